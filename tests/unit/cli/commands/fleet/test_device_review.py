"""Review of a flagged device by commands: the spooled command, and the facts that are shown afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.commands.fleet.device import confirm
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.reports.judgements import require_status
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.homes import JudgedHome, empty

pytestmark = pytest.mark.unit
RULES: dict[str, Any] = {"timeout": "1h", "session": {"idle": "60s"}, "velocity": {"events": 2, "hold": "10m"}}


def _facts(judged: JudgedHome) -> dict[str, Any]:
    return require_status(judged.home, "d", judged_ms(judged.home.checkpoint)).summary


def test_a_confirmed_flag_is_shown_without_an_end(tmp_path: Path) -> None:
    judged = JudgedHome(empty(tmp_path / "home", Deployment(1_000, 30_000)))
    policy = parse_policy({"rules": RULES}).normalised()
    judged.land_and_judge(row(0, "fleet/_/_/policy", policy=policy, effective_from_s=-1000))
    judged.land_and_judge(signal(10, kind="error", code="E"), tick(15))
    assert _facts(judged)["events_in_session"] == 1
    judged.land_and_judge(signal(20, kind="error", code="E"), tick(25))
    held = _facts(judged)
    assert (held["mode"], held["held_for_review_at_ms"], held["flagged_until_ms"]) == ("flagged", START + 20_000, START + 620_000)
    assert held["due_session_over_at_ms"] == START + 80_000
    confirm("d", home=judged.home.path)
    [[command]] = [json.loads(path.read_text()) for path in judged.home.commands.glob("*.json")]
    assert (command["topic"], command["payload"]) == ("fleet/_/d/control", {"op": "confirm"})
    judged.land_and_judge(row(30, command["topic"], **command["payload"]), tick(2_000))
    confirmed = _facts(judged)
    assert (confirmed["mode"], confirmed["confirmed_at_ms"]) == ("flagged", START + 30_000)
    assert "flagged_until_ms" not in confirmed and confirmed["held_for_review_at_ms"] is None
