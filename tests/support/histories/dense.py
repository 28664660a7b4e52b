"""Dense random histories, and differences between columnar fold and definition."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from random import Random
from typing import NamedTuple

from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.core.deadlines import next_due
from fleetpulse.core.device import Device, EvaluationContext
from fleetpulse.core.judgements import JudgementKind, compared
from fleetpulse.core.presence.coverage import ShardProgress
from fleetpulse.core.registry.device_patch import encode_device
from fleetpulse.core.replay import Deployment, Outcome, outcome
from fleetpulse.core.rows import FROM_DEVICES, Clock, Kind, Row
from tests.support.histories.histories import (
    GRID_S,
    KINDS_AND_ANSWERS,
    OWN_AND_REVIEWS,
    any_internal_row,
    any_policy,
    any_signal,
    row,
    stamped_by_bridge,
)
from tests.support.histories.key_groups import Stream

UNJUDGED = (JudgementKind.LATE, JudgementKind.CLOCK, JudgementKind.DUPLICATE, JudgementKind.REFUSED)


WORDS = (
    "a",
    "1234567",
    "12345678",
    "12345678 ",
    "123456789",
    "device-\u00fc-1234567",
    "x" * 128,
    "\u00e9" * 64,
    "\U0001f600" * 32,
)


BOOTS = ("p", "b" * 7, "b" * 8, "b" * 9, "b" * 7 + "c", "x" * 255, "x" * 256, "\u00fc" * 256)


CODES = ('"quoted"', "back\\slash", "\u00fc", "\U0001f600", "E" * 256)


NUMBERS = (0, 1, 2**62, 2**63 - 1)


class CutRow(NamedTuple):
    """Row, and whether a batch starts with it."""

    row: Row
    begins: bool


class JudgingParameters(NamedTuple):
    """Parameters for judging a history: deployment and number of key groups."""

    deployment: Deployment
    groups: int


def dense_history(seed: int) -> tuple[list[CutRow], JudgingParameters]:
    """Return a history with many silences, errors, returns and forgotten devices."""
    random = Random(seed)
    choose = random.choice
    devices = [f"device-{number}" for number in range(choose([1, 3, 8, 20]))]
    messages = choose([50, 300, 1500, 6000])
    steps = max(20, round(messages / len(devices) / choose([0.05, 0.15, 0.5, 2])))
    rows = [any_signal(choose, devices, steps, KINDS_AND_ANSWERS) for _ in range(messages)]
    rows += [_copy(random, choose(rows)) for _ in range(messages // 30)]
    own = (
        any_internal_row(choose, devices, steps, OWN_AND_REVIEWS)
        for _ in range(min(messages // choose([5, 15, 60, 600, 6000]), 120))
    )
    rows += {one.received_at_ms: one for one in own}.values()
    if choose([True, False]):
        rows.append(row(-1, "fleet/_/_/policy", policy=any_policy(choose, reviews=True), effective_from_s=-500))
    rows.append(row(steps * GRID_S + 300, "fleet/_/b/tick", op="flush"))  # emits delayed verdicts at the end
    rows = stamped_by_bridge(rows)
    if seed % 3 == 0:
        rows = _with_unusual_texts(rows, random)
    often = choose([1, 1 / 7, 1 / 60, 1 / 500]) * min(1, 200 / messages)
    cuts = [CutRow(one, random.random() < often) for one in rows]
    jitter_ms = choose([0, 0, 7_000, 40_000])
    return cuts, JudgingParameters(Deployment(choose([1, 5, 20, 60]) * 1000, 30_000, jitter_ms), choose([1, 2, 3]))


def _with_unusual_texts(rows: Sequence[Row], random: Random) -> list[Row]:
    """Replace ids, boots, codes and numbers of a history by unusual ones.

    Their lengths vary, and they have characters beyond ASCII.
    """
    devices = sorted({one.device_id for one in rows if one.kind in FROM_DEVICES})
    names = dict(zip(devices, random.sample(WORDS, min(len(WORDS), len(devices))), strict=False))
    boots = dict(zip(sorted({one.boot or "" for one in rows} - {""}), random.sample(BOOTS, len(BOOTS)), strict=False))
    codes = dict(zip(sorted({one.code or "" for one in rows} - {""}), random.sample(CODES, len(CODES)), strict=False))

    def reworded(one: Row) -> Row:
        its = one.kind in FROM_DEVICES or one.kind in (Kind.REGISTRY, Kind.CONTROL)
        return replace(
            one,
            device_id=names.get(one.device_id, one.device_id) if its else one.device_id,
            boot=boots.get(one.boot or "", one.boot),
            code=codes.get(one.code or "", one.code) if one.digest % 2 else one.code,
            seq=None if one.seq is None else NUMBERS[one.seq % len(NUMBERS)],
        )

    return [reworded(one) for one in rows]


def _copy(random: Random, one: Row) -> Row:
    """Return a copy of a message, received later.

    A copy without a timestamp has the same time of receipt; otherwise, it would be another message.
    """
    later_s = GRID_S * random.choice([0, 0, 1, 2, 8]) if one.clock is Clock.DEVICE else 0
    return replace(one, received_at_ms=one.received_at_ms + 1000 * later_s)


def difference(history: Sequence[CutRow], course: JudgingParameters) -> str | None:
    """Return the differences of the columnar fold from `outcome`, one a line, or None."""
    rows = [cut.row for cut in history]
    return difference_from(outcome(rows, course.deployment), history, course)


def difference_from(want: Outcome, history: Sequence[CutRow], course: JudgingParameters) -> str | None:
    """Return the differences of the columnar fold from a given outcome, or None."""
    stream = Stream(course.deployment, course.groups, {}, look=lambda group: _wakes_in_time(group, course.deployment))
    try:
        stream.batches([cut.row for cut in history], [place for place, cut in enumerate(history) if cut.begins])
    except Exception as error:  # noqa: BLE001 - a crash is shrunk like a difference
        return repr(error)
    emitted, judgements = stream.judgements, compared(want.judgements)
    lines = [f"too much: {one}" for one in emitted - judgements] + [f"too little: {one}" for one in judgements - emitted]
    groups = [KeyGroup.from_bytes(stored) for stored in stream.stored.values()]
    found = {device.device_id: encode_device(device, 0) for group in groups for device in _devices(group)}
    devices = {device_id: encode_device(device, 0) for device_id, device in want.devices.items()}
    lines += [f"{one}: {found.get(one)}, not {devices.get(one)}" for one in found | devices if found.get(one) != devices.get(one)]
    return "\n".join(lines) or None


def _devices(group: KeyGroup) -> list[Device]:
    known = [group.devices.get(place) for place in range(len(group.devices))]
    return [device for device in known if device is not None]


def _wakes_in_time(group: KeyGroup, deployment: Deployment) -> None:
    """Fail if the timer of a key group differs from the definition's next due instant.

    That is the instant of the first deadline or pending row. After a flush, the timer may ignore the
    delays of verdicts by the jitter.
    """
    context, devices = EvaluationContext(group.shards, group.policies), _devices(group)
    delays = group._delays(deployment.verdict_jitter_ms).tolist()
    of = group.shards.of
    its = zip(devices, delays, strict=True)
    due = [(of(one.current_site), found[0], delay) for one, delay in its if (found := next_due(one, context))]
    waits = zip(group.shards.listenings, (one.first_ms() for one in group.waiting), strict=True)
    waits = [(listening, at) for listening, at in waits if at is not None]

    def first(instants: list[tuple[ShardProgress, int]]) -> float:
        woken = [listening.due_at(at, deployment.allowed_lateness_ms) for listening, at in instants]
        return min((at for at in woken if at is not None), default=inf)

    early = first([(one, at) for one, at, _ in due] + waits)
    late = first([(one, at + delay) for one, at, delay in due] + waits)
    wakes = inf if group.due_ms is None else group.due_ms
    assert early <= wakes <= late, f"wakes at {wakes}, not from {early} to {late}; inf: while no gap is closed"
