"""Server loop of a warm process: one line of JSON per request and per answer.

Rule 1: only the standard library is imported: the Flink peer serves in a separate environment.
Rule 2: output of libraries goes to standard error, never into an answer.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer each request until standard input ends.

    The answer is the result of ``run``, or ``{"fault": ...}`` if it raises.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except Exception as error:  # noqa: BLE001 - every error becomes an answer
            answer = {"fault": f"{type(error).__name__}: {error}"[:4000]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
