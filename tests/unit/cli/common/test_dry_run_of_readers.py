"""Dry runs of read-only verbs: they list inputs, fail with the verb's errors, and write nothing."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from batch.backtest import backtest, planned
from cli.app import app
from cli.common.dry_run import Read
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.paths import ROOT
from fleetpulse.reports.frontiers import shards
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.homes import JudgedHome, apply_retention, commit_batch, empty

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(10_000))]
SHORT = '[rules]\ntimeout = "30s"\n'
AT = format_instant(START + 400_000)


@pytest.fixture
def home(home: Home, tmp_path: Path) -> Home:
    """Return a home with two devices, judged in two batches; one of them has fallen silent."""
    judged = JudgedHome(home)
    judged.land_and_judge(*(signal(at, name) for at in range(0, 500, 50) for name in ("pump", "fan")))
    judged.land_and_judge(*(signal(at, "pump") for at in range(500, 1_000, 50)), tick(5_000))
    (tmp_path / "short.toml").write_text(SHORT)
    line = {"received_at_ms": START, "topic": "fleet/site/pump/heartbeat", "payload": {"ts": START}}
    lines = [{**line, "received_at_ms": START + number * 1_000} for number in range(20)]
    (tmp_path / "recording.ndjson").write_text("".join(json.dumps(message) + "\n" for message in lines))
    return judged.home


def _calls(home: Home) -> dict[str, list[str]]:
    """Return the arguments of a call of each read-only verb."""
    home_option = ["--home", str(home.path)]
    folder = home.path.parent
    return {
        "inspect": ["state", "inspect", *home_option],
        "snapshots": ["state", "snapshots", *home_option],
        "generations": ["state", "generations", *home_option],
        "rewind": ["rewind", "--to", AT, *home_option],
        "life": ["rewind", "--to", AT, "--device", "pump", *home_option],
        "plan": ["plan", "--devices", "500", "--calibrate", *home_option],
        "backtest": ["backtest", "--policy", str(folder / "short.toml"), "--html", str(folder / "page.html"), *home_option],
        "drill": ["drill", str(folder / "recording.ndjson")],
    }


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def _error(*arguments: str) -> str:
    result = _run(*arguments)
    assert isinstance(result.exception, FleetError), result.output
    return str(result.exception)


def _dry_run(arguments: Sequence[str]) -> dict[str, Any]:
    result = _run(*arguments, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    [plan] = [json.loads(line) for line in result.stdout.splitlines()]
    assert plan["dry_run"] is True
    return plan


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_all_state_verbs_and_other_long_running_verbs_have_a_dry_run() -> None:
    root = typer.main.get_command(app)
    state_verbs = root.commands["state"].commands  # type: ignore[attr-defined]
    other_verbs = {name: root.commands[name] for name in ("rewind", "plan", "backtest", "drill", "amend", "maintain")}  # type: ignore[attr-defined]
    options = {
        name: {option for parameter in verb.params for option in parameter.opts}
        for name, verb in {**state_verbs, **other_verbs}.items()
    }
    assert [name for name, names in options.items() if "--dry-run" not in names] == []
    assert len(state_verbs) > 10


def test_dry_runs_of_read_only_verbs_write_nothing_and_import_no_spark(home: Home) -> None:
    calls = [arguments for name, arguments in _calls(home).items() if name != "drill"]
    before = _files(home.path.parent)
    script = (
        "import json, sys\nfrom typer.testing import CliRunner\nfrom cli.app import app\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    done = CliRunner().invoke(app, [*arguments, '--dry-run'])\n"
        "    assert done.exit_code == 0 and 'would read' in done.stdout, (arguments, done.output, done.exception)\n"
        "print(sorted({'pyspark', 'py4j', 'paho'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, json.dumps(calls)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
    assert _files(home.path.parent) == before


def test_a_dry_run_of_drill_starts_no_process_and_creates_no_home(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(home.path.parent))
    before = _files(home.path.parent)
    plan = _dry_run(_calls(home)["drill"])
    assert "in 7 parts, and between them: snapshot; migrate" in plan["does"]
    [read] = plan["reads"]
    assert (read["rows"], read["from"], read["to"]) == (20, format_instant(START), format_instant(START + 19_000))
    [written] = plan["writes"]
    assert str(home.path.parent / "fleet-drill-") in written and "removed at the end" in written
    assert "kept" in _dry_run([*_calls(home)["drill"], "--keep"])["writes"][0]
    assert _files(home.path.parent) == before


def test_a_dry_run_of_inspect_reports_the_batch_and_the_size_of_the_state(home: Home) -> None:
    state = home.checkpoint / "state"
    state.mkdir()
    (state / "1.zip").write_bytes(b"four")
    plan = _dry_run(_calls(home)["inspect"])
    assert plan["does"] == "show the state of generation 1 after batch 2: 8 key groups in 2 partitions"
    assert {"files": 1, "size_bytes": 4}.items() <= plan["reads"][0].items()
    assert "after batch 1:" in _dry_run([*_calls(home)["inspect"], "--at-batch", "1"])["does"]
    shown = _run(*_calls(home)["inspect"], "--dry-run").stdout
    assert "would show the state of generation 1" in shown and ": 1 file, 4 B" in shown and "batch.log" in shown


def test_a_dry_run_of_rewind_reports_the_tables_and_their_instants(home: Home) -> None:
    plan = _dry_run(_calls(home)["rewind"])
    assert plan["does"] == f"show every device's mode at {AT}, as it is known now" and plan["writes"] == []
    judgements, devices = plan["reads"]
    assert judgements["what"] == JUDGEMENTS.name and judgements["rows"] > 0 and judgements["from"] <= AT
    assert devices == {"what": "devices", "files": 0, "rows": 0}
    assert f"the life of pump up to {AT}" in _dry_run(_calls(home)["life"])["does"]
    known = _dry_run([*_calls(home)["rewind"], "--known", "then"])
    assert known["does"].endswith(f"as it was known at {AT}")


def test_a_dry_run_of_backtest_predicts_the_messages_and_span_of_the_comparison(home: Home) -> None:
    arguments = _calls(home)["backtest"]
    plan = _dry_run(arguments)
    result = _run(*arguments, "--json")
    [figures] = [json.loads(line) for line in result.stdout.splitlines()]
    assert plan["does"] == (
        f"judge {figures['rows']:,} messages twice, in this process, and compare the verdicts of "
        f"{figures['from']} to {figures['to']}"
    )
    assert plan["reads"][0]["what"] == "messages" and plan["reads"][0]["rows"] == figures["rows"] == 31
    assert plan["writes"] == [f'the page "{home.path.parent / "page.html"}"']
    assert "on Spark" in (spark := _dry_run([*arguments, "--spark"]))["does"] and "Spark's" in spark["writes"][1]


def test_the_planned_end_of_a_backtest_is_its_actual_end(home: Home) -> None:
    policy = parse_policy({"rules": {"timeout": "30s"}})
    kept_ms = START + 200_000
    for from_ms, to_ms in ((None, None), (kept_ms, None), (None, kept_ms)):
        landed = shards(home, None)
        assert landed is not None and landed.frontier_ms is not None
        planned_ms = planned(home, policy, from_ms, to_ms).end_ms(home, landed.frontier_ms)
        assert planned_ms == backtest(home, policy, from_ms, to_ms).figures.to_ms


def test_a_dry_run_of_plan_measures_nothing_and_lists_the_given_options(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batch.calibrate.calibrate", lambda report: pytest.fail("the dry run measures"))
    plan = _dry_run([*_calls(home)["plan"], "--errors", "0.1"])
    assert plan["does"].startswith("measure the costs on this machine")
    assert plan["does"].endswith(f'and plan for the fleet of "{home.path}", with options: devices, error')
    assert plan["reads"][0]["what"] == "messages" and plan["reads"][0]["rows"] == 31
    assert "planning.json" in plan["writes"][0]
    alone = _dry_run(["plan"])
    assert alone["does"] == "plan for the built-in fleet" and alone["writes"] == [] and len(alone["reads"]) == 1


@pytest.mark.parametrize(
    ("verb", "options", "reason"),
    [
        ("inspect", ["--at-batch", "7"], "batch 7 is not in the checkpoint, which keeps 1 to 2"),
        ("rewind", ["--to", format_instant(START - 1)], "begins at"),
        ("rewind", ["--to", "2999-01-01T00:00:00Z"], "--to must be an instant in the past"),
        ("rewind", ["--mode", "on"], "the mode must be one of"),
        ("rewind", ["--known", "yesterday"], "an instant must be ISO 8601"),
        ("life", ["--device", "nobody"], 'no device "nobody" was registered or heard'),
        ("plan", ["--interval", "0s"], "--interval must be longer than 0s"),
        ("plan", ["--keep", "0s"], "--keep must be longer than 0s"),
        ("backtest", ["--policy", "none.toml"], "cannot be read"),
        ("backtest", ["--from", format_instant(START - 1)], "is the oldest instant"),
        ("backtest", ["--from", AT, "--to", format_instant(START)], "--from lies before --to"),
        ("backtest", ["--from", format_instant(START + 4_995_000)], "the frontier has not reached --from"),
        ("backtest", ["--html", "nowhere/page.html"], "No such file or directory"),
        ("backtest", ["--html", "."], "Is a directory"),
        ("drill", ["--lateness", "soon"], "a duration"),
    ],
)
def test_a_dry_run_fails_with_the_same_error_as_the_verb(
    home: Home, monkeypatch: pytest.MonkeyPatch, verb: str, options: list[str], reason: str
) -> None:
    def start_spark(*_: object, **__: object) -> None:
        pytest.fail("a refused dry run starts Spark")

    monkeypatch.setattr("batch.common.spark_session.spark_session", start_spark)
    monkeypatch.setattr("batch.calibrate.calibrate", lambda report: pytest.fail("a refused dry run measures"))
    arguments = [*_calls(home)[verb], *options]
    error = _error(*arguments, "--dry-run")
    assert reason in error
    assert error == _error(*arguments)


@pytest.mark.parametrize("verb", ["inspect", "snapshots", "generations", "rewind", "plan", "backtest"])
def test_a_dry_run_without_a_fleet_is_refused(home: Home, tmp_path: Path, verb: str) -> None:
    assert "there is no fleet in" in _error(*_calls(home)[verb][:-1], str(tmp_path / "nowhere"), "--dry-run")


def test_a_dry_run_of_backtest_is_refused_for_rows_that_retention_removed(tmp_path: Path) -> None:
    judged = JudgedHome(empty(tmp_path / "home", Deployment(10_000)))
    judged.land_and_judge(*(signal(at) for at in range(0, 1_000, 50)))
    judged.land_and_judge(*(signal(3 * 86_400 + at) for at in range(0, 1_000, 50)))
    kept_ms = apply_retention(judged.home, 3, 86_400_000)
    (tmp_path / "short.toml").write_text(SHORT)
    arguments = _calls(judged.home)["backtest"]
    error = _error(*arguments, "--dry-run", "--from", format_instant(START))
    assert "keep_messages" in error and error == _error(*arguments, "--from", format_instant(START))
    assert format_instant(kept_ms) in _dry_run(arguments)["does"]


def test_a_dry_run_of_drill_refuses_a_damaged_or_absent_recording(home: Home) -> None:
    arguments = _calls(home)["drill"]
    Path(arguments[1]).write_text("{}\n")
    assert "is not a recorded message" in _error(*arguments, "--dry-run")
    assert "there is no recording" in _error("drill", str(home.path / "none"), "--dry-run")


def test_a_dry_run_of_inspect_refuses_the_checkpoint_of_another_home(home: Home) -> None:
    commit_batch(home.checkpoint, 3, START)
    offset = home.checkpoint / "offsets" / "3"
    offset.write_text(offset.read_text().replace('"version": 1', '"version": 99'))
    assert "the checkpoint belongs to another home" in _error(*_calls(home)["inspect"], "--dry-run")


def test_unknown_amounts_of_an_input_are_omitted() -> None:
    assert Read("a file").sentence() == "a file" and Read("a file").plain() == {"what": "a file"}
    read = Read("messages", 2, 1_234, 5_000_000, 0, 1)
    assert read.sentence() == "messages: 2 files, 1,234 rows, 5 MB, 1970-01-01T00:00:00.000Z to 1970-01-01T00:00:00.001Z"


def test_misuse_in_a_dry_run_keeps_its_error_class(home: Home) -> None:
    assert isinstance(_run(*_calls(home)["rewind"], "--mode", "on", "--dry-run").exception, Misuse)
