"""Declarations of state variables: a process that only declares them imports no compiled code."""

import subprocess
import sys

import pytest

from fleetpulse.paths import ROOT

pytestmark = pytest.mark.unit
# As Spark's process before the first batch of a query: ``init``, then ``close``.
DECLARED = """
import sys
from types import SimpleNamespace

from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorHandleState

from fleetpulse.core.replay import Deployment
from fleetpulse.io.lifecycle.stateful_processor import GroupProcessor
from fleetpulse.io.streams.session_processor import SessionProcessor

for processor in (GroupProcessor(Deployment(1_000), 4), SessionProcessor(1_000)):
    declared = []
    client = SimpleNamespace(
        handle_state=StatefulProcessorHandleState.PRE_INIT,
        get_value_state=lambda name, *_: declared.append(name),
        get_map_state=lambda name, *_: declared.append(name),
        _parse_string_schema=str,
    )
    processor.init(StatefulProcessorHandle(client))
    processor.close()
    print(*declared)
print({"numba", "numpy", "pyarrow", "pandas", "deltalake"} & {*sys.modules})
"""


def test_a_process_that_declares_state_variables_imports_no_compiled_code() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", DECLARED], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["group waiting digests", "group copy", "set()"]
