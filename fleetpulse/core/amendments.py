"""Amendments: retractions and additions for late messages, and correction rows.

A history is judged twice: as received, and as if no message had been late. The differences are
amended.

Rule 1: the amended history is the outcome of `core.replay` over the same rows. Late messages and
corrected registry entries count as on time; correction rows have no effect.
Rule 2: emitted judgements are never rewritten. A transition that did not happen is retracted, and a
missing transition is added. If any transition of a device at an instant differs, all its emitted
transitions at this instant are retracted, and all those of the amended history are added.
Rule 3: a correction row applies at one instant and carries the fingerprint of the device then. The
fold refuses it if the device differs.

Source: ADR 13.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from fleetpulse.core.device import EvaluationContext
from fleetpulse.core.judgements import COMPARED, CORRECTED_ENTRY, REASONS, Judgement, JudgementKind
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.presence.identities import topic_of
from fleetpulse.core.registry.device_patch import encode_device, fingerprint, same_state
from fleetpulse.core.replay import EMPTY_OUTCOME, Deployment, Outcome, outcome
from fleetpulse.core.rows import EVERYONE, Kind, Row

LEAD_MS: Final = 10_000  # least distance of a correction row from the frontier: time to reach the lifecycle job
_NEVER: Final = 2**63
_CONTENT_COLUMNS: Final = tuple(name for name in COMPARED if name not in ("kind", "transition_no"))  # columns of `content`


def transition_order(one: Judgement) -> tuple[int, int]:
    """Return the sort key of a device's transitions, including additions."""
    return (one.event_time_ms or 0, one.amendment_no or one.transition_no or 0)


def effective_transitions(emitted: Iterable[Judgement]) -> list[Judgement]:
    """Return the effective transitions of a device, after amendments, in order.

    Args:
        emitted: transitions, retractions and additions of one device, in any order.
    """
    judgements = list(emitted)
    retracted = {(one.takes_back, one.life_ms, one.transition_no) for one in judgements if one.kind is JudgementKind.RETRACT}
    judged = [
        one
        for one in judgements
        if one.kind is JudgementKind.TRANSITION and (None, one.life_ms, one.transition_no) not in retracted
    ]
    retracted_additions = {number for number, _, _ in retracted}
    added = [one for one in judgements if one.kind is JudgementKind.ADD and one.amendment_no not in retracted_additions]
    return sorted([*judged, *added], key=transition_order)


def content(one: Judgement) -> tuple[Any, ...]:
    """Return the compared values of a transition, without its number."""
    return tuple(getattr(one, name) for name in _CONTENT_COLUMNS)


def amendments(
    emitted: Iterable[Judgement],
    amended: Iterable[Judgement],
    why: str,
    through_ms: int,
    is_after: Callable[[Judgement], bool] = lambda _: True,
) -> list[Judgement]:
    """Return the rows that turn the emitted transitions of a device into the amended history.

    Args:
        emitted: transitions, retractions and additions of one device.
        amended: transitions of its amended history.
        why: reason of the retractions.
        through_ms: instant up to which the amended history is known, epoch milliseconds; later
            judgements remain as they are.
        is_after: whether a judgement lies after the start of the amended history.
    """
    judgements = list(emitted)

    def known(some: Iterable[Judgement]) -> dict[int, list[Judgement]]:
        return _by_instant(one for one in some if (one.event_time_ms or 0) <= through_ms and is_after(one))

    now, then = known(effective_transitions(judgements)), known(sorted(amended, key=transition_order))
    number = max((one.amendment_no or 0 for one in judgements), default=0)
    rows: list[Judgement] = []
    for instant_ms in sorted({*now, *then}):
        before, after = now.get(instant_ms, []), then.get(instant_ms, [])
        if [content(one) for one in before] == [content(one) for one in after]:
            continue
        rows += [replace(one, kind=JudgementKind.RETRACT, takes_back=one.amendment_no, reason=why) for one in before]
        rows += [replace(one, kind=JudgementKind.ADD, transition_no=None) for one in after]
    return [replace(one, amendment_no=number + place) for place, one in enumerate(rows, 1)]


def _by_instant(some: Iterable[Judgement]) -> dict[int, list[Judgement]]:
    found: dict[int, list[Judgement]] = {}
    for one in some:
        found.setdefault(one.event_time_ms or 0, []).append(one)
    return found


def retracted_offline(emitted: Iterable[Judgement]) -> list[tuple[int, int | None]]:
    """Return the offline spans of a device that late messages have retracted.

    Args:
        emitted: transitions, retractions and additions of one device.

    Returns:
        Start and end of each span, epoch milliseconds; the end is None if the device is still
        offline by its judged transitions.
    """
    judgements = list(emitted)
    if not any(one.kind is JudgementKind.RETRACT and one.reason == REASONS[JudgementKind.RETRACT] for one in judgements):
        return []
    left = _offline(one for one in judgements if one.kind is JudgementKind.TRANSITION)
    for since_ms, until_ms in _offline(effective_transitions(judgements)):
        parts = [(start, min(end, since_ms)) for start, end in left] + [(max(start, until_ms), end) for start, end in left]
        left = sorted(part for part in parts if part[0] < part[1])
    return [(since_ms, None if until_ms == _NEVER else until_ms) for since_ms, until_ms in left]


def _offline(some: Iterable[Judgement]) -> list[tuple[int, int]]:
    ordered = sorted(some, key=transition_order)
    ends = [*(one.event_time_ms or 0 for one in ordered[1:]), _NEVER]
    return [(one.event_time_ms or 0, end) for one, end in zip(ordered, ends, strict=False) if one.to_mode is Mode.OFFLINE]


@dataclass(frozen=True, slots=True)
class Histories:
    """The judged and the amended history of the same rows.

    Attributes:
        judged: outcome as it was judged.
        amended: outcome as if no message had been late.
        initial: outcome of the rows before them.
    """

    judged: Outcome
    amended: Outcome
    initial: Outcome = EMPTY_OUTCOME

    def is_after(self, one: Judgement) -> bool:
        """Whether a judgement lies after the initial frontier of its device.

        Earlier judgements are not emitted again.
        """
        if self.initial.shards is None:
            return True
        device = self.initial.devices.get(one.device_id)
        began_ms = self.initial.shards.of(one.site if device is None else device.current_site).frontier_ms
        return began_ms is None or (one.event_time_ms or 0) > began_ms

    def through_ms(self, device_id: str) -> int | None:
        """Return the frontier up to which a device is judged; None before the first row."""
        if self.judged.shards is None:
            return None
        device = self.judged.devices.get(device_id)
        return self.judged.frontier_ms if device is None else self.judged.shards.of(device.current_site).frontier_ms

    def differ(self, device_id: str) -> bool:
        """Whether the states of a device differ between the two histories."""
        return not same_state(self.judged.devices.get(device_id), self.amended.devices.get(device_id))


def histories(
    rows: Iterable[Row],
    deployment: Deployment,
    initial: Outcome = EMPTY_OUTCOME,
    through_ms: int | None = None,
    through_site: str | None = None,
) -> Histories:
    """Judge rows twice: as received, and as if none had been late; see `outcome`."""
    all_rows = list(rows)
    return Histories(
        outcome(all_rows, deployment, initial=initial, through_ms=through_ms, through_site=through_site),
        outcome(all_rows, deployment, initial=initial, through_ms=through_ms, through_site=through_site, amending=True),
        initial,
    )


def amend(both: Histories, emitted: Mapping[str, Iterable[Judgement]]) -> dict[str, list[Judgement]]:
    """Return the missing retractions and additions of each device that has any.

    Args:
        both: both histories, judged up to the same frontier.
        emitted: retractions and additions of earlier amendments, by device to amend.
    """
    judged, amended = transitions(both.judged), transitions(both.amended)
    late = {one.device_id for one in both.judged.judgements if one.kind is JudgementKind.LATE}
    found: dict[str, list[Judgement]] = {}
    if (frontier_ms := both.judged.frontier_ms) is None:
        return found
    for device_id, before in emitted.items():
        why = REASONS[JudgementKind.RETRACT] if device_id in late else CORRECTED_ENTRY
        known = [*judged.get(device_id, []), *before]
        rows = amendments(known, amended.get(device_id, []), why, frontier_ms, both.is_after)
        if rows:
            found[device_id] = rows
    return found


def transitions(judged: Outcome) -> dict[str, list[Judgement]]:
    """Return the transitions of each device."""
    found: dict[str, list[Judgement]] = {}
    for one in judged.judgements:
        if one.kind is JudgementKind.TRANSITION:
            found.setdefault(one.device_id, []).append(one)
    return found


@dataclass(frozen=True, slots=True)
class ReplayOrigin:
    """Snapshot from which a history can be judged again, as from the first row.

    Attributes:
        newest_ms: ``received_at`` of the newest row that the snapshot includes.
        frontier_ms: event time up to which the snapshot is judged.
        amended_ms: ``received_at`` up to which all late messages were amended before the snapshot,
            so that the snapshot is the state of both histories; None if unknown.
    """

    newest_ms: int
    frontier_ms: int
    amended_ms: int | None = None

    def beyond(self, late: Iterable[tuple[int, int]]) -> int | None:
        """Return the earliest event time that cannot be amended; None if all can.

        Args:
            late: event time and ``received_at`` of every late message of a device, epoch
                milliseconds.
        """
        return min((event_ms for event_ms, received_ms in late if not self._reaches(event_ms, received_ms)), default=None)

    def _reaches(self, event_ms: int, received_ms: int) -> bool:
        if received_ms > self.newest_ms:
            return event_ms > self.frontier_ms
        return self.amended_ms is not None and received_ms <= self.amended_ms


@dataclass(frozen=True, slots=True)
class Correction:
    """Correction row: sets a live device to the state of its amended history.

    Attributes:
        device_id: id of the device.
        payload: payload of the row, see `Fold`; ``effective_from`` is the instant it applies at.
        site: current site of the device.
    """

    device_id: str
    payload: Mapping[str, Any]
    site: str

    @property
    def topic(self) -> str:
        """MQTT topic to publish the row to."""
        return topic_of(self.device_id, Kind.CORRECT.value, self.site)


def corrections(
    rows: Iterable[Row], deployment: Deployment, device_ids: Iterable[str], initial: Outcome = EMPTY_OUTCOME
) -> list[Correction] | None:
    """Return a correction row for each device whose two histories differ.

    The rows take effect half of the allowed lateness beyond the frontier, but at least `LEAD_MS`.
    Nearly all messages that are in time have been received by then, and the lifecycle job has not
    judged that instant yet. Devices with a pending correction row are left out.

    Args:
        rows: all known rows of these devices, and all rows for everyone.
        deployment: settings of the installation.
        device_ids: ids of the devices to correct.
        initial: outcome of the rows before them.

    Returns:
        The rows; None instead of an empty list if a coverage gap stops a frontier.
    """
    all_rows = list(rows)
    now = outcome(all_rows, deployment, initial=initial)
    if now.shards is None:
        return []
    under_way = {row.device_id for row in now.pending if row.kind is Kind.CORRECT}
    sites = {row.device_id: row.site for row in sorted(all_rows, key=lambda row: row.arrival) if row.site != EVERYONE}
    sites |= {one.device_id: one.current_site for one in now.devices.values()}
    found: list[Correction] = []
    blocked = False
    by_shard: dict[int, list[str]] = {}
    for device_id in sorted({*device_ids} - under_way):
        by_shard.setdefault(now.shards.number(sites.get(device_id)), []).append(device_id)
    for shard, shard_devices in by_shard.items():
        listening = now.shards.listenings[shard]
        if listening.frontier_ms is None:
            continue
        coverage, lead_ms = listening.coverage, max(deployment.allowed_lateness_ms // 2, LEAD_MS)
        at_ms = coverage.earliest(coverage.covered(listening.frontier_ms) + lead_ms)
        if at_ms is None:
            blocked = True
            continue
        used_instants = {row.at_ms for row in now.pending}
        while at_ms in used_instants:  # rows at one instant would depend on their order
            at_ms += 1
        site = next((sites[one] for one in shard_devices if one in sites), EVERYONE)
        both = histories(all_rows, deployment, initial, at_ms - 1, site)
        received_at_ms = listening.due_at(at_ms - 1, deployment.allowed_lateness_ms)
        then = now.shards if received_at_ms is None else now.shards.read(received_at_ms, deployment.allowed_lateness_ms)
        found += _corrections(both, shard_devices, sites, EvaluationContext(then, now.policies), listening.frontier_ms, at_ms)
    return None if blocked and not found else found


def _corrections(
    both: Histories, device_ids: Iterable[str], sites: Mapping[str, str], context: EvaluationContext, frontier_ms: int, at_ms: int
) -> list[Correction]:
    """Return a correction row for each device whose states differ at an instant.

    Args:
        both: histories, judged up to the instant before ``at_ms``.
        device_ids: devices of one shard.
        sites: current site of each device.
        context: coverage and frontiers of the sites at ``at_ms``.
        frontier_ms: present frontier of the shard, epoch milliseconds.
        at_ms: instant at which the rows take effect, epoch milliseconds.
    """
    last_no = _last_numbers(both.judged, both.initial)
    found: list[Correction] = []
    for device_id in device_ids:
        if not both.differ(device_id):
            continue
        was, amended = both.judged.devices.get(device_id), both.amended.devices.get(device_id)
        if amended is not None:
            reached_ms = context.shards.of(amended.current_site).frontier_ms
            if reached_ms is None or reached_ms < at_ms - 1:
                continue  # the frontier of its shard is behind: a later amend corrects it
            amended = replace(amended, transition_no=last_no.get((device_id, amended.life_ms), 0))
        site = sites.get(device_id, EVERYONE) if was is None else was.current_site
        payload = {
            "effective_from": at_ms,
            "frontier_ms": frontier_ms,
            "was": fingerprint(was, context.covered(site, at_ms), at_ms),
            "device": None if amended is None else encode_device(amended, context.covered(amended.current_site, at_ms), at_ms),
        }
        found.append(Correction(device_id, payload, site))
    return found


def _last_numbers(judged: Outcome, initial: Outcome) -> dict[tuple[str, int], int]:
    """Return the number of the last transition of each life, by device and life.

    A corrected device continues with the next number.
    """
    found = {(one.device_id, one.life_ms): one.transition_no for one in initial.devices.values()}
    for one in judged.judgements:
        if one.kind is JudgementKind.TRANSITION and one.life_ms is not None and one.transition_no is not None:
            life = (one.device_id, one.life_ms)
            found[life] = max(found.get(life, 0), one.transition_no)
    return found
