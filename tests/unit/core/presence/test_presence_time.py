"""Presence time: judgements on inputs from the field, and the clock and reboots in the state."""

import pytest

from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.presence.presence_time import clock_description
from fleetpulse.core.replay import Outcome, outcome, replay
from fleetpulse.core.rows import Trust
from tests.support.histories.histories import START, changes, row, signal, tick
from tests.support.histories.presence_cases import CASES, DEPLOYMENT, Case, rows_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", CASES)
def test_inputs_from_the_field_are_judged_correctly(name: str) -> None:
    check(CASES[name], outcome(rows_of([CASES[name]]), DEPLOYMENT))


def test_inputs_from_the_field_are_judged_alike_together_and_alone() -> None:
    assert len(CASES) > 20
    result = outcome(rows_of([*CASES.values()]), DEPLOYMENT)
    for case in CASES.values():
        check(case, result)


def check(case: Case, result: Outcome) -> None:
    """Compare the verdicts on a case's devices with those of an outcome."""
    for device_id, expected in case.want.items():
        own = [one for one in result.judgements if one.device_id == device_id]
        assert [one for one in changes(own) if one[0] <= case.until_s] == list(expected), device_id
    for device_id, reboots in case.reboots.items():
        assert result.devices[device_id].reboots == reboots
    for (device_id, kind), count in case.listed.items():
        assert sum(one.kind is kind and one.device_id == device_id for one in result.judgements) == count


@pytest.mark.parametrize(
    ("name", "device_id", "clock", "offset_ms", "description", "listed"),
    [
        ("ten minutes ahead", "c1", Trust.AHEAD, 600_000, "10m ahead", {JudgementKind.CLOCK: 1}),
        ("it counts from its start", "c2", Trust.INVALID, None, "not set", {JudgementKind.CLOCK: 1}),
        ("two minutes behind", "c3", Trust.LATE, -120_000, "2m behind, or its messages are held up", {JudgementKind.LATE: 60}),
        ("not set at its start, then right", "c4", Trust.ON_TIME, None, None, {JudgementKind.CLOCK: 1}),
        ("the default of a real-time clock, then right", "c5", Trust.ON_TIME, None, None, {JudgementKind.CLOCK: 1}),
        ("1,024 weeks back", "c6", Trust.BEHIND, -1024 * 604_800_000, "not set", {JudgementKind.CLOCK: 1}),
        ("a backlog at once", "c7", Trust.ON_TIME, None, None, {JudgementKind.LATE: 119}),
    ],
)
def test_the_state_keeps_clock_fault_and_offset(
    name: str, device_id: str, clock: Trust, offset_ms: int | None, description: str | None, listed: dict[JudgementKind, int]
) -> None:
    result = outcome(rows_of([CASES[name]]), DEPLOYMENT)
    device = result.devices[device_id]
    assert (device.clock, device.clock_offset_ms) == (clock, offset_ms)
    assert clock_description(device.clock, device.clock_offset_ms) == description
    for kind, count in listed.items():
        assert sum(one.kind is kind for one in result.judgements) == count


def test_a_late_signal_proves_life_and_sets_no_other_field() -> None:
    rows = [signal(0, boot="a", seq=1), signal(10, kind="error", code="E1", received_s=300, boot="b", seq=9), tick(400)]
    device = outcome(rows, DEPLOYMENT).devices["d"]
    assert (device.last_seen_ms, device.boot, device.seq, device.codes) == (START + 300_000, "a", 1, ())
    through = row(300, "d/telemetry", ts_s=10, gateway="g")
    device = outcome([signal(0), through, tick(400)], DEPLOYMENT).devices["d"]
    assert device.last_seen_ms == START, "a gateway may deliver old data"


def test_a_policy_decides_whether_late_signals_prove_life() -> None:
    def last_seen_ms(proves: bool, **more: str) -> int | None:
        content = parse_policy({"rules": {"late_proves_alive": proves}}).normalised()
        before = [row(-1, "fleet/_/_/policy", policy=content, effective_from_s=-10), signal(0)]
        late = signal(10, received_s=300, **more)
        return outcome([*before, late, tick(400)], DEPLOYMENT).devices["d"].last_seen_ms

    assert (last_seen_ms(True, gateway="g"), last_seen_ms(False)) == (START + 300_000, START)


def test_will_and_birth_are_ordered_by_arrival_and_not_by_event_time() -> None:
    def transitions(death_s: float, birth_s: float, birth_ts_s: float) -> list[tuple[float, str, str, str]]:
        rows = [signal(0), row(death_s, "d/death"), signal(birth_ts_s, kind="birth", received_s=birth_s), tick(400)]
        return changes(replay(rows, DEPLOYMENT))

    assert transitions(100, 101, 99) == transitions(100, 101, 101) == [(0, "provisioned", "online", "signal")]
    assert transitions(101, 100, 99)[1:] == transitions(101, 100, 101)[1:] == [(131, "online", "offline", "death")]


def test_an_identity_conflict_is_a_return_within_a_day_and_reported_once_a_day() -> None:
    def conflicts(*hours: float) -> list[float]:
        sites = ("oslo", "rome")
        rows = [row(3600 * hour, f"fleet/{sites[number % 2]}/d/heartbeat") for number, hour in enumerate(hours)]
        judgements = replay([*rows, tick(3600 * hours[-1] + 100)], DEPLOYMENT)
        return [
            ((one.event_time_ms or 0) - START) / 3_600_000
            for one in judgements
            if one.kind is JudgementKind.IDENTITY_CONFLICT and one.reason
        ]

    assert conflicts(0, 1, 2, 3, 25, 26) == [2, 26], "a day after the first report"
    assert conflicts(0, 1, 24.9) == [24.9]
    assert conflicts(0, 1, 25) == [], "the first move is a day old"


def test_a_signal_received_before_the_newest_one_moves_no_device() -> None:
    def conflicts(site: str) -> list[JudgementKind]:
        rows = [row(10, "fleet/oslo/d/heartbeat", ts_s=0), row(20, "fleet/rome/d/heartbeat", ts_s=20)]
        rows.append(row(15, f"fleet/{site}/d/heartbeat", ts_s=25))
        return [one.kind for one in replay([*rows, tick(100)], DEPLOYMENT) if one.kind is JudgementKind.IDENTITY_CONFLICT]

    assert conflicts("oslo") == [], "received before the one from rome"


def test_a_devices_own_limits_apply_from_their_registry_entry_to_the_next() -> None:
    def offline(*entries: tuple[float, dict[str, int]]) -> list[float]:
        rows = [signal(0), *(row(at_s, "fleet/site/d/registry", op="add", **limits) for at_s, limits in entries), tick(9_000)]
        return [at_s for at_s, _, to_mode, _ in changes(replay(rows, DEPLOYMENT)) if to_mode == "offline"]

    assert offline((100, {"timeout_ms": 600_000})) == [600]
    assert offline((700, {"timeout_ms": 600_000})) == [700], "not before the entry"
    assert offline((100, {"timeout_ms": 600_000}), (200, {})) == [3_600]
    assert offline((100, {"timeout_ms": 999})) == [3_600], "below the least timeout of a policy: refused"


@pytest.mark.parametrize("field", ["session", "boot"])
def test_a_late_birth_names_the_session_so_that_its_will_takes_effect(field: str) -> None:
    rows = [row(0, "d/birth", ts_s=0, **{field: "1"}), signal(1_000, "e")]
    rows += [row(2_000, "d/birth", ts_s=-1_600, **{field: "2"}), row(2_100, "d/death", **{field: "2"}), tick(4_000)]
    judgements = [one for one in outcome(rows, DEPLOYMENT).judgements if one.device_id == "d"]
    assert changes(judgements)[-1] == (2_130, "online", "offline", "death")
