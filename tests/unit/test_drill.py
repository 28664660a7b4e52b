"""What a drill says of two runs: nothing where they agree, and each judgement that only one of them made."""

import json
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import batch.drill
import batch.session
import cli.drill
import cli.replaying
from fleetpulse.core.errors import FleetError
from fleetpulse.io.home import Home
from fleetpulse.ops.agreement import COMPARED

JUDGEMENT = {**dict.fromkeys(COMPARED), "kind": "transition", "device_id": "pump-1", "transition_no": 3, "to_mode": "offline"}
AGREED = (*JUDGEMENT.values(),)
MOVED = (*{**JUDGEMENT, "event_time_ms": 7}.values(),)


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[Any]]:
    """Return what each run tells, by the name of its home; no job runs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told: dict[str, Counter[Any]] = {"undisturbed": Counter([AGREED]), "disturbed": Counter([AGREED])}
    monkeypatch.setattr(cli.replaying, "replay", lambda home, *rest: home.prepare(None))
    monkeypatch.setattr(batch.session, "batch_session", lambda home, size: nullcontext())
    monkeypatch.setattr(batch.drill, "disturbed", lambda *rest: None)
    monkeypatch.setattr(cli.drill, "told", lambda home: told[home.path.name])
    return told


def _drill(tmp_path: Path, *, json_lines: bool = False) -> None:
    cli.drill.drill(tmp_path / "recording.ndjson", "60s", keep=False, json_lines=json_lines)


def test_two_runs_that_agree_pass_and_leave_nothing(
    homes: dict[str, Counter[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _drill(tmp_path)
    assert "the drill passed: 6 operations, 1 judgements, no difference" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("json_lines", [True, False])
def test_each_difference_is_told_with_the_run_that_alone_has_it(
    homes: dict[str, Counter[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str], json_lines: bool
) -> None:
    homes["disturbed"] = Counter([MOVED])
    with pytest.raises(FleetError, match="found 2 differences in 1 judgements"):
        _drill(tmp_path, json_lines=json_lines)
    out, err = capsys.readouterr()
    if json_lines:
        rows = [json.loads(line) for line in out.splitlines()]
        sides = [("disturbed", "pump-1", "1970-01-01T00:00:00.007Z"), ("undisturbed", "pump-1", None)]
        assert [(row["side"], row["device_id"], row["event_time"]) for row in rows] == sides
    else:
        assert "differences" in err
    kept = Path(err.split("both homes are kept: ")[1].split("\n")[0])
    assert Home(kept / "undisturbed").exists()


def test_a_recording_without_a_verdict_proves_nothing(homes: dict[str, Counter[Any]], tmp_path: Path) -> None:
    homes |= {"undisturbed": Counter(), "disturbed": Counter()}
    with pytest.raises(FleetError, match="gives no verdict at all"):
        _drill(tmp_path)
