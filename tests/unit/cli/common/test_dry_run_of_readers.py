"""The dry run of a verb that only reads says what it would read, is refused where the verb is, and touches nothing."""

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
from fleetpulse.reports.judgements import shards
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.homes import JudgedHome, apply_retention, commit_batch, empty

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(10_000))]
SHORT = '[rules]\ntimeout = "30s"\n'
AT = format_instant(START + 400_000)


@pytest.fixture
def home(home: Home, tmp_path: Path) -> Home:
    """Two devices, judged in two batches, of which one has fallen silent."""
    judged = JudgedHome(home)
    judged.land_and_judge(*(signal(at, name) for at in range(0, 500, 50) for name in ("pump", "fan")))
    judged.land_and_judge(*(signal(at, "pump") for at in range(500, 1_000, 50)), tick(5_000))
    (tmp_path / "short.toml").write_text(SHORT)
    line = {"received_at_ms": START, "topic": "fleet/site/pump/heartbeat", "payload": {"ts": START}}
    lines = [{**line, "received_at_ms": START + number * 1_000} for number in range(20)]
    (tmp_path / "recording.ndjson").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return judged.home


def _words(home: Home) -> dict[str, list[str]]:
    """Return a call of each verb that only reads."""
    own = ["--home", str(home.path)]
    beside = home.path.parent
    return {
        "inspect": ["state", "inspect", *own],
        "snapshots": ["state", "snapshots", *own],
        "generations": ["state", "generations", *own],
        "rewind": ["rewind", "--to", AT, *own],
        "life": ["rewind", "--to", AT, "--device", "pump", *own],
        "plan": ["plan", "--devices", "500", "--calibrate", *own],
        "backtest": ["backtest", "--policy", str(beside / "short.toml"), "--html", str(beside / "page.html"), *own],
        "drill": ["drill", str(beside / "recording.ndjson")],
    }


def _done(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def _refused(*words: str) -> str:
    done = _done(*words)
    assert isinstance(done.exception, FleetError), done.output
    return str(done.exception)


def _dry(words: Sequence[str]) -> dict[str, Any]:
    done = _done(*words, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    [told] = [json.loads(line) for line in done.stdout.splitlines()]
    assert told["dry_run"] is True
    return told


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_every_verb_of_the_state_and_every_other_long_one_has_a_dry_run() -> None:
    root = typer.main.get_command(app)
    of_state = root.commands["state"].commands  # type: ignore[attr-defined]
    others = {name: root.commands[name] for name in ("rewind", "plan", "backtest", "drill", "amend", "maintain")}  # type: ignore[attr-defined]
    options = {name: {word for one in verb.params for word in one.opts} for name, verb in {**of_state, **others}.items()}
    assert [name for name, words in options.items() if "--dry-run" not in words] == []
    assert len(of_state) > 10


def test_dry_runs_of_what_reads_write_nothing_and_load_no_spark(home: Home) -> None:
    calls = [words for name, words in _words(home).items() if name != "drill"]
    before = _files(home.path.parent)
    script = (
        "import json, sys\nfrom typer.testing import CliRunner\nfrom cli.app import app\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    done = CliRunner().invoke(app, [*words, '--dry-run'])\n"
        "    assert done.exit_code == 0 and 'would read' in done.stdout, (words, done.output, done.exception)\n"
        "print(sorted({'pyspark', 'py4j', 'paho'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, json.dumps(calls)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert _files(home.path.parent) == before


def test_a_dry_run_of_a_drill_starts_nothing_and_makes_no_home(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(home.path.parent))
    before = _files(home.path.parent)
    told = _dry(_words(home)["drill"])
    assert "in 7 parts, and between them: snapshot; migrate" in told["does"]
    [read] = told["reads"]
    assert (read["rows"], read["from"], read["to"]) == (20, format_instant(START), format_instant(START + 19_000))
    [written] = told["writes"]
    assert str(home.path.parent / "fleet-drill-") in written and "removed at the end" in written
    assert "kept" in _dry([*_words(home)["drill"], "--keep"])["writes"][0]
    assert _files(home.path.parent) == before


def test_a_dry_run_of_an_inspection_says_which_batch_and_how_much_state(home: Home) -> None:
    state = home.checkpoint / "state"
    state.mkdir()
    (state / "1.zip").write_bytes(b"four")
    told = _dry(_words(home)["inspect"])
    assert told["does"] == "show the state of generation 1 after batch 2: 8 key groups in 2 partitions"
    assert {"files": 1, "size_bytes": 4}.items() <= told["reads"][0].items()
    assert "after batch 1:" in _dry([*_words(home)["inspect"], "--at-batch", "1"])["does"]
    shown = _done(*_words(home)["inspect"], "--dry-run").stdout
    assert "would show the state of generation 1" in shown and ": 1 file, 4 B" in shown and "batch.log" in shown


def test_a_dry_run_of_a_rewind_says_which_tables_and_of_when(home: Home) -> None:
    told = _dry(_words(home)["rewind"])
    assert told["does"] == f"show every device's mode at {AT}, as it is known now" and told["writes"] == []
    judgements, devices = told["reads"]
    assert judgements["what"] == JUDGEMENTS.name and judgements["rows"] > 0 and judgements["from"] <= AT
    assert devices == {"what": "devices", "files": 0, "rows": 0}
    assert f"the life of pump up to {AT}" in _dry(_words(home)["life"])["does"]
    known = _dry([*_words(home)["rewind"], "--known", "then"])
    assert known["does"].endswith(f"as it was known at {AT}")


def test_a_dry_run_of_a_backtest_foretells_what_the_backtest_then_compares(home: Home) -> None:
    words = _words(home)["backtest"]
    told = _dry(words)
    done = _done(*words, "--json")
    [figures] = [json.loads(line) for line in done.stdout.splitlines()]
    assert told["does"] == (
        f"judge {figures['rows']:,} messages twice, in this process, and compare the verdicts of "
        f"{figures['from']} to {figures['to']}"
    )
    assert told["reads"][0]["what"] == "messages" and told["reads"][0]["rows"] == figures["rows"] == 31
    assert told["writes"] == [f'the page "{home.path.parent / "page.html"}"']
    assert "on Spark" in (spark := _dry([*words, "--spark"]))["does"] and "Spark's" in spark["writes"][1]


def test_the_frontier_that_is_foretold_is_the_one_that_is_judged_to(home: Home) -> None:
    policy = parse_policy({"rules": {"timeout": "30s"}})
    kept_ms = START + 200_000
    for from_ms, to_ms in ((None, None), (kept_ms, None), (None, kept_ms)):
        landed = shards(home, None)
        assert landed is not None and landed.frontier_ms is not None
        foretold = planned(home, policy, from_ms, to_ms).end_ms(home, landed.frontier_ms)
        assert foretold == backtest(home, policy, from_ms, to_ms).figures.to_ms


def test_a_dry_run_of_a_plan_measures_nothing_and_names_what_is_given(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batch.calibrate.calibrate", lambda told: pytest.fail("it measures"))
    told = _dry([*_words(home)["plan"], "--errors", "0.1"])
    assert told["does"].startswith("measure the costs on this machine")
    assert told["does"].endswith(f'and plan for the fleet of "{home.path}", with options: devices, error')
    assert told["reads"][0]["what"] == "messages" and told["reads"][0]["rows"] == 31
    assert "planning.json" in told["writes"][0]
    alone = _dry(["plan"])
    assert alone["does"] == "plan for the built-in fleet" and alone["writes"] == [] and len(alone["reads"]) == 1


@pytest.mark.parametrize(
    ("verb", "more", "why"),
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
def test_a_dry_run_is_refused_where_the_verb_is_in_the_same_words(
    home: Home, monkeypatch: pytest.MonkeyPatch, verb: str, more: list[str], why: str
) -> None:
    def started(*_: object, **__: object) -> None:
        pytest.fail("Spark is started for what is refused")

    monkeypatch.setattr("batch.common.spark_session.spark_session", started)
    monkeypatch.setattr("batch.calibrate.calibrate", lambda told: pytest.fail("it measures for what is refused"))
    words = [*_words(home)[verb], *more]
    dry = _refused(*words, "--dry-run")
    assert why in dry
    assert dry == _refused(*words)


@pytest.mark.parametrize("verb", ["inspect", "snapshots", "generations", "rewind", "plan", "backtest"])
def test_a_dry_run_where_no_fleet_is_says_so(home: Home, tmp_path: Path, verb: str) -> None:
    assert "there is no fleet in" in _refused(*_words(home)[verb][:-1], str(tmp_path / "nowhere"), "--dry-run")


def test_a_dry_run_of_a_backtest_is_refused_what_retention_has_removed(tmp_path: Path) -> None:
    judged = JudgedHome(empty(tmp_path / "home", Deployment(10_000)))
    judged.land_and_judge(*(signal(at) for at in range(0, 1_000, 50)))
    judged.land_and_judge(*(signal(3 * 86_400 + at) for at in range(0, 1_000, 50)))
    kept_ms = apply_retention(judged.home, 3, 86_400_000)
    (tmp_path / "short.toml").write_text(SHORT)
    words = _words(judged.home)["backtest"]
    refused = _refused(*words, "--dry-run", "--from", format_instant(START))
    assert "keep_messages" in refused and refused == _refused(*words, "--from", format_instant(START))
    assert format_instant(kept_ms) in _dry(words)["does"]


def test_a_recording_that_is_damaged_is_refused_by_the_dry_run_as_well(home: Home) -> None:
    words = _words(home)["drill"]
    Path(words[1]).write_text("{}\n")
    assert "is not a recorded message" in _refused(*words, "--dry-run")
    assert "there is no recording" in _refused("drill", str(home.path / "none"), "--dry-run")


def test_another_homes_checkpoint_is_not_looked_at_in_a_dry_run(home: Home) -> None:
    commit_batch(home.checkpoint, 3, START)
    offset = home.checkpoint / "offsets" / "3"
    offset.write_text(offset.read_text().replace('"version": 1', '"version": 99'))
    assert "the checkpoint belongs to another home" in _refused(*_words(home)["inspect"], "--dry-run")


def test_what_is_not_known_of_something_is_not_told() -> None:
    assert Read("a file").sentence() == "a file" and Read("a file").plain() == {"what": "a file"}
    some = Read("messages", 2, 1_234, 5_000_000, 0, 1)
    assert some.sentence() == "messages: 2 files, 1,234 rows, 5 MB, 1970-01-01T00:00:00.000Z to 1970-01-01T00:00:00.001Z"


def test_misuse_stays_misuse(home: Home) -> None:
    assert isinstance(_done(*_words(home)["rewind"], "--mode", "on", "--dry-run").exception, Misuse)
