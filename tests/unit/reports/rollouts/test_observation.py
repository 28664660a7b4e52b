"""Counts of a started cohort: connected devices, spans, and the frontier."""

from pathlib import Path

import pytest

from fleetpulse.core.rollouts.verdict import Answers, Counts
from fleetpulse.core.streams.tables import COMMANDS
from fleetpulse.io.tables.tables import query
from fleetpulse.reports.rollouts.observation import answers, emitted_through_ms, observe
from tests.support.histories.histories import row
from tests.support.homes.rolled_out import RolledOutHome

pytestmark = pytest.mark.unit


@pytest.fixture
def fleet(tmp_path: Path) -> RolledOutHome:
    """Return a home with 8 pumps that are online."""
    return RolledOutHome(tmp_path / "home", pumps=8, others=0)


def test_devices_that_go_offline_or_have_errors_count_in_their_group(fleet: RolledOutHome) -> None:
    cohort, rest = fleet.pumps[:4], fleet.pumps[4:]
    from_ms = fleet.now_ms
    fleet.run(120, silent=["pump-0", "pump-1", "pump-4"], faulty=["pump-2", "pump-5", "pump-6"])
    seen = observe(fleet.home, 1, from_ms, cohort, rest)
    assert (seen.cohort, seen.rest, seen.before) == (Counts(4, 2, 1), Counts(4, 1, 2), Counts(4))
    assert seen.through_ms == emitted_through_ms(fleet.home) == fleet.now_ms + 1_000 - 10_000


def test_a_device_that_came_back_has_been_offline_all_the_same(fleet: RolledOutHome) -> None:
    from_ms = fleet.now_ms
    fleet.run(100, silent=["pump-0"])
    fleet.run(60)
    assert observe(fleet.home, 1, from_ms, ["pump-0"], fleet.pumps[1:]).cohort == Counts(1, 1, 0)


def test_devices_that_were_not_connected_at_the_start_do_not_count(fleet: RolledOutHome) -> None:
    fleet.run(120, silent=["pump-0", "pump-4"])
    from_ms = fleet.now_ms
    fleet.run(40)
    fleet.run(120, silent=["pump-0", "pump-4"])
    seen = observe(fleet.home, 1, from_ms, fleet.pumps[:4], fleet.pumps[4:])
    assert (seen.cohort, seen.rest) == (Counts(3), Counts(3)), "they came back and went offline again"
    assert seen.before == Counts(3), "the past is that of the same devices"


def test_the_past_of_a_cohort_is_an_equal_time_before_its_start(fleet: RolledOutHome) -> None:
    fleet.run(120, silent=["pump-0"], faulty=["pump-1"])
    fleet.run(60)
    from_ms = fleet.now_ms
    fleet.run(60)
    assert observe(fleet.home, 3, from_ms, fleet.pumps, []).before == Counts(8, 0, 0)
    fleet.run(180)
    seen = observe(fleet.home, 3, from_ms, fleet.pumps, [])
    assert (seen.cohort, seen.rest, seen.before) == (Counts(8), Counts(0), Counts(8, 1, 1))


def test_an_error_that_does_not_degrade_a_device_counts(fleet: RolledOutHome) -> None:
    from_ms = fleet.now_ms
    fleet.run(20, faulty=["pump-0"])
    fleet.run(40)
    assert observe(fleet.home, 1, from_ms, fleet.pumps[:2], fleet.pumps[2:]).cohort == Counts(2, 0, 1)


def test_a_device_that_is_degraded_again_after_its_announced_update_has_no_error(fleet: RolledOutHome) -> None:
    """The announcement hides the mode of the device, and its end shows it again; the rest has no announcement."""
    fleet.run(80, faulty=["pump-0", "pump-1", "pump-4"])
    fleet.run(20)
    from_ms = fleet.now_ms
    announced = (("pump-0", 20), ("pump-1", 20), ("pump-2", 20))
    fleet.batch(
        *(row(fleet.now_s + 2, f"fleet/north/{name}/control", op="update", until=from_ms + s * 1_000) for name, s in announced)
    )
    fleet.run(60)
    modes = query(fleet.home, "SELECT from_mode, to_mode FROM transitions WHERE device_id = 'pump-0' ORDER BY transition_no")
    assert [(one["from_mode"], one["to_mode"]) for one in modes[-2:]] == [("degraded", "updating"), ("updating", "degraded")]
    seen = observe(fleet.home, 1, from_ms, fleet.pumps[:4], fleet.pumps[4:])
    assert (seen.cohort, seen.rest) == (Counts(4), Counts(4))
    fleet.run(60, faulty=["pump-1"])
    assert observe(fleet.home, 1, from_ms, fleet.pumps[:4], fleet.pumps[4:]).cohort == Counts(4, 0, 1)


def test_nothing_is_counted_before_the_frontier_passes_the_start(fleet: RolledOutHome) -> None:
    seen = observe(fleet.home, 1, fleet.now_ms, fleet.pumps, [])
    assert seen.through_ms is not None and seen.through_ms < fleet.now_ms and seen.cohort == Counts(0)


def test_the_first_answer_to_a_command_counts_and_a_missing_one_is_pending(fleet: RolledOutHome) -> None:
    def append(command_id: str, status: str, answered_s: int | None = None) -> None:
        at_ms = None if answered_s is None else fleet.now_ms + answered_s * 1_000
        fleet.append(COMMANDS, {"command_id": command_id, "device_id": "d", "status": status, "answered_at_ms": at_ms})

    ids = ["taken", "refused", "lost", "open", "unknown"]
    assert answers(fleet.home, ids, expected=False) is None
    assert answers(fleet.home, ids, expected=True) == Answers(pending=5)
    for command_id in ids[:4]:
        append(command_id, "pending")
    append("taken", "acknowledged", 1)
    append("taken", "unmatched", 2)
    append("refused", "rejected", 1)
    append("lost", "timed_out")
    append("lost", "unmatched", 9)
    append("of another rollout", "acknowledged", 1)
    assert answers(fleet.home, ids, expected=False) == Answers(2, 1, 1, 1)
