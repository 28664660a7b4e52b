"""Presence time: the definition's verdicts on inputs from the field, and clock and counter in the state."""

import pytest

from fleetpulse.core.clocks import clock_words
from fleetpulse.core.judgements import Verdict
from fleetpulse.core.messages import Trust
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import outcome, replay
from tests.histories import START, changes, row, signal, tick
from tests.presence import CASES, DEPLOYMENT, Case, rows_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", CASES)
def test_inputs_from_the_field_are_judged_right(name: str) -> None:
    check(CASES[name], [CASES[name]])


def test_all_inputs_at_once_are_judged_as_each_alone() -> None:
    together = [case for case in CASES.values() if not case.alone]
    assert len(together) > 20
    for case in together:
        check(case, together)


def check(case: Case, among: list[Case]) -> None:
    """Compare the verdicts on a case's devices, judged among others."""
    known = outcome(rows_of(among), DEPLOYMENT)
    for device_id, want in case.want.items():
        its = [one for one in known.judgements if one.device_id == device_id]
        assert [one for one in changes(its) if one[0] <= case.until_s] == list(want), device_id
    for device_id, reboots in case.reboots.items():
        assert known.devices[device_id].reboots == reboots


@pytest.mark.parametrize(
    ("name", "device_id", "clock", "offset_ms", "words", "listed"),
    [
        ("ten minutes ahead", "c1", Trust.AHEAD, 600_000, "10m ahead", {Verdict.CLOCK: 1}),
        ("it counts from its start", "c2", Trust.INVALID, None, "not set", {Verdict.CLOCK: 1}),
        ("two minutes behind", "c3", Trust.LATE, -120_000, "2m behind, or its messages are held up", {Verdict.LATE: 60}),
        ("not set at its start, then right", "c4", Trust.ON_TIME, None, None, {Verdict.CLOCK: 1}),
        ("the default of a real-time clock, then right", "c5", Trust.ON_TIME, None, None, {Verdict.CLOCK: 1}),
        ("1,024 weeks back", "c6", Trust.BEHIND, -1024 * 604_800_000, "not set", {Verdict.CLOCK: 1}),
        ("a backlog at once", "c7", Trust.ON_TIME, None, None, {Verdict.LATE: 119}),
    ],
)
def test_the_state_keeps_clock_fault_and_offset(
    name: str, device_id: str, clock: Trust, offset_ms: int | None, words: str | None, listed: dict[Verdict, int]
) -> None:
    known = outcome(rows_of([CASES[name]]), DEPLOYMENT)
    device = known.devices[device_id]
    assert (device.clock, device.clock_offset_ms) == (clock, offset_ms)
    assert clock_words(device.clock, device.clock_offset_ms) == words
    for verdict, count in listed.items():
        assert sum(one.kind is verdict for one in known.judgements) == count


def test_a_late_signal_counts_as_heard_and_not_as_data() -> None:
    rows = [signal(0, boot="a", seq=1), signal(10, kind="error", code="E1", received_s=300, boot="b", seq=9), tick(400)]
    device = outcome(rows, DEPLOYMENT).devices["d"]
    assert (device.last_seen_ms, device.boot, device.seq, device.codes) == (START + 300_000, "a", 1, ())
    through = row(300, "d/telemetry", ts_s=10, gateway="g")
    device = outcome([signal(0), through, tick(400)], DEPLOYMENT).devices["d"]
    assert device.last_seen_ms == START, "a gateway may deliver old data"


def test_a_class_decides_whether_late_signals_prove_life() -> None:
    def seen(proves: bool, **more: str) -> int | None:
        content = parse_policy({"rules": {"late_proves_alive": proves}}).normalised()
        known = [row(-1, "fleet/_/_/policy", policy=content, effective_from_s=-10), signal(0)]
        late = signal(10, received_s=300, **more)
        return outcome([*known, late, tick(400)], DEPLOYMENT).devices["d"].last_seen_ms

    assert (seen(True, gateway="g"), seen(False)) == (START + 300_000, START)


def test_swapping_will_and_birth_in_event_time_changes_nothing_and_in_arrival_everything() -> None:
    def found(death_s: float, birth_s: float, birth_ts_s: float) -> list[tuple[float, str, str, str]]:
        rows = [signal(0), row(death_s, "d/death"), signal(birth_ts_s, kind="birth", received_s=birth_s), tick(400)]
        return changes(replay(rows, DEPLOYMENT))

    assert found(100, 101, 99) == found(100, 101, 101) == [(0, "provisioned", "online", "signal")]
    assert found(101, 100, 99)[1:] == found(101, 100, 101)[1:] == [(131, "online", "offline", "death")]
