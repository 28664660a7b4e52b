"""Presence time: the definition's verdicts on inputs from the field, and clock and counter in the state."""

import pytest

from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.presence.presence_time import clock_description
from fleetpulse.core.replay import outcome, replay
from fleetpulse.core.rows import Trust
from tests.support.histories.histories import START, changes, row, signal, tick
from tests.support.histories.presence_cases import CASES, DEPLOYMENT, Case, rows_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", CASES)
def test_inputs_from_the_field_are_judged_right(name: str) -> None:
    check(CASES[name], [CASES[name]])


def test_all_inputs_at_once_are_judged_as_each_alone() -> None:
    assert len(CASES) > 20
    for case in CASES.values():
        check(case, [*CASES.values()])


def check(case: Case, among: list[Case]) -> None:
    """Compare the verdicts on a case's devices, judged among others."""
    known = outcome(rows_of(among), DEPLOYMENT)
    for device_id, want in case.want.items():
        its = [one for one in known.judgements if one.device_id == device_id]
        assert [one for one in changes(its) if one[0] <= case.until_s] == list(want), device_id
    for device_id, reboots in case.reboots.items():
        assert known.devices[device_id].reboots == reboots
    for (device_id, verdict), count in case.listed.items():
        assert sum(one.kind is verdict and one.device_id == device_id for one in known.judgements) == count


@pytest.mark.parametrize(
    ("name", "device_id", "clock", "offset_ms", "words", "listed"),
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
    name: str, device_id: str, clock: Trust, offset_ms: int | None, words: str | None, listed: dict[JudgementKind, int]
) -> None:
    known = outcome(rows_of([CASES[name]]), DEPLOYMENT)
    device = known.devices[device_id]
    assert (device.clock, device.clock_offset_ms) == (clock, offset_ms)
    assert clock_description(device.clock, device.clock_offset_ms) == words
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


def test_an_identity_conflict_is_reported_once_a_day_and_not_where_the_device_is_back_a_day_later() -> None:
    def conflicts(*hours: float) -> list[float]:
        sites = ("oslo", "rome")
        rows = [row(3600 * hour, f"fleet/{sites[number % 2]}/d/heartbeat") for number, hour in enumerate(hours)]
        said = replay([*rows, tick(3600 * hours[-1] + 100)], DEPLOYMENT)
        return [
            ((one.event_time_ms or 0) - START) / 3_600_000
            for one in said
            if one.kind is JudgementKind.IDENTITY_CONFLICT and one.reason
        ]

    assert conflicts(0, 1, 2, 3, 25, 26) == [2, 26], "a day after the first report"
    assert conflicts(0, 1, 24.9) == [24.9]
    assert conflicts(0, 1, 25) == [], "it moved a day ago"


def test_a_signal_that_was_received_before_those_heard_moves_no_device() -> None:
    def late(site: str) -> list[JudgementKind]:
        rows = [row(10, "fleet/oslo/d/heartbeat", ts_s=0), row(20, "fleet/rome/d/heartbeat", ts_s=20)]
        rows.append(row(15, f"fleet/{site}/d/heartbeat", ts_s=25))
        return [one.kind for one in replay([*rows, tick(100)], DEPLOYMENT) if one.kind is JudgementKind.IDENTITY_CONFLICT]

    assert late("oslo") == [], "received before the one from rome"


def test_limits_of_its_own_act_from_the_entry_that_gives_them_and_end_with_the_next() -> None:
    def offline(*entries: tuple[float, dict[str, int]]) -> list[float]:
        rows = [signal(0), *(row(at_s, "fleet/site/d/registry", op="add", **limits) for at_s, limits in entries), tick(9_000)]
        return [at_s for at_s, _, to_mode, _ in changes(replay(rows, DEPLOYMENT)) if to_mode == "offline"]

    assert offline((100, {"timeout_ms": 600_000})) == [600]
    assert offline((700, {"timeout_ms": 600_000})) == [700], "not before the entry"
    assert offline((100, {"timeout_ms": 600_000}), (200, {})) == [3_600]
    assert offline((100, {"timeout_ms": 999})) == [3_600], "below what a policy may say: refused"


@pytest.mark.parametrize("word", ["session", "boot"])
def test_a_late_birth_names_the_session_so_that_its_will_takes_effect(word: str) -> None:
    rows = [row(0, "d/birth", ts_s=0, **{word: "1"}), signal(1_000, "e")]
    rows += [row(2_000, "d/birth", ts_s=-1_600, **{word: "2"}), row(2_100, "d/death", **{word: "2"}), tick(4_000)]
    known = [one for one in outcome(rows, DEPLOYMENT).judgements if one.device_id == "d"]
    assert changes(known)[-1] == (2_130, "online", "offline", "death")
