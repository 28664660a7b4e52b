"""Separate Airflow for tests, and a stub of the command ``fleet``.

The environment of Airflow is set before the first import of ``airflow``. The stub logs its calls,
and keeps the same records as the real command; a test chooses the verbs that fail. Tests of the
operators call the real command.
"""

import atexit
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.paths import ROOT

PLACE = Path(tempfile.mkdtemp(prefix="fleet-dags-"))
atexit.register(shutil.rmtree, PLACE, ignore_errors=True)
COMMAND = PLACE / "fleet"
OF_AIRFLOW = [
    pytest.mark.dags,
    pytest.mark.filterwarnings("ignore:Using .httpx. with"),  # raised in this process by the API server, whose client is older
]

os.environ.update(
    {
        "AIRFLOW_HOME": str(PLACE / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(PLACE / "no-dags"),
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "false",  # a paused DAG would never run
        "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "false",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{PLACE}/airflow.db",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
        "FLEET_HOME": str(PLACE / "home"),
        "FLEET_COMMAND": str(COMMAND),
        "FLEET_SELF_APPROVAL": "yes",  # the runs of ``dag.test`` have no user
    }
)
(PLACE / "no-dags").mkdir()

STUB = f"""#!{sys.executable} -IS
import json, pathlib, sys, time
place = pathlib.Path({str(PLACE)!r})
words = sys.argv[1:]
home = pathlib.Path(words[words.index("--home") + 1])
with (place / "calls").open("a") as calls:
    calls.write(json.dumps(words[: words.index("--home")]) + "\\n")
line = " ".join(words)
fails = json.loads((place / "fails.json").read_text())
for verb, sentence in fails.items():
    if line.startswith(verb):
        print("what it does first", file=sys.stderr)
        print("fleet: " + sentence, file=sys.stderr)
        sys.exit(1)
record = home / "checkpoints" / "lifecycle" / "generations.json"
def switch(number):
    record.write_text(json.dumps({{"current": number, "generations": []}}))
def hold(number, status):
    made = {{"number": number, "key_groups": 8, "form": 4, "made_by": words[1], "made_at_ms": 5, "status": status}}
    record.write_text(json.dumps({{**json.loads(record.read_text()), "generations": [made]}}))
if line.startswith(("stream stop", "stream start")):
    found = json.loads((home / "desired.json").read_text())
    if found["what"] == "stopped" and found["by"] != words[3]:
        sys.exit("fleet: the stream is stopped by " + found["by"])
    what = "stopped" if words[1] == "stop" else "running"
    (home / "desired.json").write_text(json.dumps({{"what": what, "by": words[3], "at_ms": 1}}))
if line.startswith("state switch"):
    switch(int(words[2]))
if line.startswith("state rollback"):
    switch(1)
if line.startswith("state discard"):
    hold(int(words[2]), "discarded")
if "--dry-run" in words:
    print("it would go on in form 4", file=sys.stderr)
    if words[1] == "bootstrap":
        print("snapshot version 3 of generation 1 after batch 9: 5 of 5 devices; bronze is read from version 2", file=sys.stderr)
        print("dropped devices: " + ("1,200" if "--only" in line else "0"), file=sys.stderr)
elif "--hold" in words:
    hold(2, "held")
    print(json.dumps({{"generation": 2, "made_by": words[1]}}))
"""


class StubCommand:
    """Home of a DAG run, and log of the stub's calls."""

    def __init__(self, place: Path) -> None:
        self.place, self.home = place, place / "home"

    def fail(self, **verbs: str) -> None:
        """Make verbs (their words joined by _) fail with a message."""
        (self.place / "fails.json").write_text(json.dumps({verb.replace("_", " "): message for verb, message in verbs.items()}))

    def calls(self) -> list[str]:
        """Return the arguments of each call, as one line."""
        log = self.place / "calls"
        return [" ".join(json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []

    def desired(self) -> dict[str, str]:
        """Return the desired state of the lifecycle job."""
        return json.loads((self.home / "desired.json").read_text())


def built(name: str) -> Any:
    """Build a DAG from its file, without deadlines, which ``dag.test`` cannot run."""
    return module(name).build(alarmed=False)


def module(name: str) -> Any:
    """Load the file of a DAG by its path, as Airflow does."""
    spec = importlib.util.spec_from_file_location(f"dags_{name}", ROOT / "dags" / f"{name}.py")
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
