"""Damaged files of a home: each command that reads one reports it and leaves it unchanged."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError

from cli import app
from cli.entry import run
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import AUDIT
from fleetpulse.core.times import format_instant
from fleetpulse.io.delta.corruption import DamagedError, corruption_message, open_table, reporting_corruption_of_file
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables as delta
from fleetpulse.paths import ROOT
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.homes import JudgedHome, take_snapshot
from tests.support.refusals import refused

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(1_000, 300_000))]
REWIND = ["rewind", "--to", format_instant(START + 50_000)]
SNAPSHOTS, AMEND, MAINTAIN = ["state", "snapshots"], ["amend"], ["maintain", "--dry-run"]
COMMANDS = {
    ("device_snapshots", "log"): [SNAPSHOTS, AMEND, MAINTAIN],
    ("device_snapshots", "parquet"): [AMEND],
    ("messages", "log"): [REWIND, ["plan"], AMEND, MAINTAIN, ["status"]],
    ("messages", "parquet"): [["plan"], AMEND, ["devices"]],
    ("judgements", "log"): [REWIND, AMEND, MAINTAIN, ["late"]],
    ("judgements", "parquet"): [REWIND, AMEND, MAINTAIN, ["transitions"]],
}


@pytest.fixture
def home(home: Home) -> Home:
    judged = JudgedHome(home)
    policy = row(0, "fleet/_/_/policy", policy=parse_policy({"rules": {"timeout": "60s"}}).normalised(), effective_from_s=-1000)
    judged.land_and_judge(policy, signal(10), tick(100))
    judged.land_and_judge(signal(40, received_s=110), signal(90, received_s=110), tick(120))
    return judged.home


def _damage(home: Home, table: str, part: str) -> None:
    """Truncate the newest commit, or all files of rows, as a full disk does."""
    if part == "log":
        paths = [max((home.table(table) / "_delta_log").glob("*.json"))]
    else:
        paths = [path for path in home.table(table).rglob("*.parquet") if "_delta_log" not in path.parts]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-30])


def _files(home: Home) -> dict[Path, bytes]:
    """Return the files of all tables but ``audit``, which records each command."""
    paths = [path for path in (home.path / "tables").rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in paths if not path.is_relative_to(home.table(AUDIT.name))}


@pytest.mark.parametrize(
    ("table", "part", "command"),
    [(*key, command) for key, commands in COMMANDS.items() for command in commands],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_damaged_table_file_is_reported_and_left_unchanged(
    home: Home,
    table: str,
    part: str,
    command: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if table == "device_snapshots":
        take_snapshot(home)
    _damage(home, table, part)
    before = _files(home)
    monkeypatch.setattr(sys, "argv", ["fleet", *command, "--home", str(home.path)])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("fleet: ") and "cannot be read: a file is damaged or missing (" in message, message
    assert table in message and message.endswith("run the command again, and if it fails again, restore the home from a backup")
    assert _files(home) == before


@pytest.mark.parametrize("part", ["log", "parquet"])
def test_backtest_of_damaged_bronze_fails_with_a_message_and_no_traceback(home: Home, tmp_path: Path, part: str) -> None:
    _damage(home, "messages", part)
    before = _files(home)
    policy = tmp_path / "policy.toml"
    policy.write_text('[rules]\ntimeout = "2m"\n')
    command = [sys.executable, "-m", "cli", "backtest", "--policy", str(policy), "--home", str(home.path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{home.table('messages')}" in done.stderr and "cannot be read: a file is damaged or missing (" in done.stderr
    assert _files(home) == before


@pytest.mark.parametrize("full", [OSError(28, "No space left on device", "a/b"), DeltaError("Generic error: (os error 28)")])
def test_full_disk_is_reported_in_one_sentence_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], full: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise full

    monkeypatch.setattr(sys, "argv", ["fleet", "status"])
    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit) as ended:
        run()
    location = ' ("a/b")' if isinstance(full, OSError) else ""
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"fleet: the disk is full{location}; free some space, as ./fleet maintain does, and run the command again\n"
    )


def test_errors_without_a_damaged_file_are_not_reported_as_damage(home: Home) -> None:
    with pytest.raises(duckdb.BinderException), delta.reading(home) as tables:
        delta.fetch(tables, "SELECT nobody FROM judgements")
    with pytest.raises(duckdb.InvalidInputException), delta.reading(home) as tables:
        delta.fetch(tables, "SELECT ? FROM judgements")
    with pytest.raises(pa.ArrowInvalid) as cast:
        pa.array(["x"]).cast(pa.int64())
    full = DeltaError("Generic LocalFileSystem error: No space left on device (os error 28)")
    for error in (full, cast.value, KeyError("a"), TypeError("b"), CommitFailedError("another was first"), FleetError("c")):
        assert corruption_message(error) is None


def test_missing_file_is_named_in_the_error(home: Home) -> None:
    [first, *_] = delta.paths_of(home, delta.declared("messages"))
    first.unlink()
    with refused("file-damaged", DamagedError, match=first.name), reporting_corruption_of_file(first):
        pq.read_table(first)
    with refused("file-damaged", DamagedError, match=first.name):
        delta.query(home, "SELECT count(*) FROM messages", tables=["messages"])
    with refused("file-damaged", DamagedError):
        open_table(home.path / "nowhere")
    assert DeltaTable(str(home.table("messages"))).version() == open_table(home.table("messages")).version()
