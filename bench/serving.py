"""A warm process and who asks it: a line of JSON in, a line of JSON out.

Rule 1: the standard library only: the peer outside Spark serves in an environment of its own.
Rule 2: what a library prints goes to standard error, never into an answer.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer each request until standard input ends; an answer is what ``run`` returns, or ``{"fault": ...}``."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the answer
            answer = {"fault": f"{type(error).__name__}: {error}"[:4000]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
