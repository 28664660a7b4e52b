"""Availability: share of the reachable, covered time in which devices were heard within their timeout."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports.history.availability import CoveredSpans, Span, availability
from tests.support.histories.histories import START
from tests.support.homes.homes import empty

pytestmark = pytest.mark.unit
HOUR_MS = 3_600_000


def _home(folder: Path, *modes: str, first_no: int = 1) -> Home:
    """Return a home in which one device changes to the next mode every hour."""
    home, rows = empty(folder, Deployment(10_000)), list[dict[str, Any]]()
    for number, (before, after) in enumerate(pairwise(modes), 1):
        device = {"kind": "transition", "device_id": "pump", "site": "site", "device_class": "default", "life_ms": START}
        change = {"transition_no": first_no + number - 1, "from_mode": before, "to_mode": after}
        rows.append({**device, **change, "event_time_ms": START + number * HOUR_MS})
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "test", 1)
    return home


def _shares(home: Home, hours: int) -> dict[str, Any]:
    [share] = availability(home, CoveredSpans([[Span(START, START + hours * HOUR_MS)]]), ["site"])
    return share


@pytest.mark.parametrize(
    ("mode", "available"),
    [
        ("online", 1.0),
        ("degraded", 1.0),
        ("flagged", 1.0),
        ("offline", 0.5),
        ("updating", 0.5),
        ("maintenance", 0.5),
        ("provisioned", 0.5),
        ("unreachable", 1.0),  # neither up nor down
        ("decommissioned", 1.0),  # out of service
        ("forgotten", 1.0),
    ],
)
def test_a_mode_counts_as_available_or_not_or_is_excluded(tmp_path: Path, mode: str, available: float) -> None:
    share = _shares(_home(tmp_path / "home", "online", mode, "online"), 2)
    assert share["available"] == pytest.approx(available)


def test_a_device_that_was_only_unreachable_has_no_availability(tmp_path: Path) -> None:
    share = _shares(_home(tmp_path / "home", "unreachable", "online"), 1)
    assert (share["available"], share["unreachable"]) == (None, 1.0)


def test_before_its_first_written_transition_a_device_has_the_mode_it_left(tmp_path: Path) -> None:
    share = _shares(_home(tmp_path / "home", "offline", "online", first_no=2), 4)
    assert (share["provisioned"], share["offline"], share["online"]) == pytest.approx((0, 0.25, 0.75))
