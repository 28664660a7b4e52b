"""Status of a device after retention: derived facts stay exact, and unknown ones are omitted."""

from typing import Any

import pytest

from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.times import DAY_MS
from fleetpulse.io.home.home import Home
from fleetpulse.reports import judgements
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.homes import JudgedHome, apply_retention

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(allowed_lateness_ms=1_000, max_clock_lead_ms=300_000))]
LATER_S = 3 * DAY_MS // 1000
NEWEST_MS = START + (LATER_S + 40) * 1000
RULES: dict[str, Any] = {"rules": {"timeout": "60s", "forget_after": "30d"}}


@pytest.fixture
def home(home: Home) -> Home:
    """Judge ``d`` and ``e``, silent since the first day; three days later ``d`` returns and ``n`` is new."""
    judged = JudgedHome(home)
    policy = row(0, "fleet/_/_/policy", policy=parse_policy(RULES).normalised(), effective_from_s=-1000)
    first = [signal(at, device) for at in (10, 30, 60) for device in ("d", "e")]
    judged.land_and_judge(policy, *first, tick(200))
    judged.land_and_judge(
        signal(LATER_S), *(signal(LATER_S + at, device) for at in (10, 30) for device in ("d", "n")), tick(LATER_S + 40)
    )
    return judged.home


def _summary(home: Home, device_id: str) -> dict[str, Any]:
    found = judgements.device_status(home, device_id, NEWEST_MS)
    assert found is not None
    return found.summary


def test_retention_does_not_shorten_the_life_of_a_device(home: Home) -> None:
    before, new = _summary(home, "d"), _summary(home, "n")
    apply_retention(home, 2, DAY_MS)
    after = _summary(home, "d")
    assert after["life_ms"] == before["life_ms"] == START + 10_000
    assert after["runtime_ms"] == judgements.transitions(home, "d")[-1]["runtime_ms"] == 50_000
    assert after["due_offline_at_ms"] == before["due_offline_at_ms"] == START + (LATER_S + 90) * 1000
    assert after["judged_up_to_ms"] == before["judged_up_to_ms"]
    assert "reboots" in before
    assert "reboots" not in after
    assert _summary(home, "n") == new, "bronze has all rows of its life"


def test_device_whose_signals_were_removed_has_no_due_instants(home: Home) -> None:
    assert any(name.startswith("due_") for name in _summary(home, "e"))
    apply_retention(home, 2, DAY_MS)
    after = _summary(home, "e")
    assert (after["mode"], after["life_ms"]) == ("offline", START + 10_000)
    assert not [name for name in after if name.startswith("due_")]
