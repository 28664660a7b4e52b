"""Amend: replay devices with late messages or corrected registry entries.

Rule 1: amendments follow from bronze and from the judgements already emitted. A killed and repeated
run therefore emits each amendment once.
Rule 2: a device is processed by each run until its judged and amended histories are in the same
state. A device that cannot be reconciled, as bronze lacks its rows, is reported once, and not
processed again.
Rule 3: a run only appends to judgements, and sends correction rows through the bridge, like commands.
The job continues meanwhile.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

from batch.common.progress import Paced, ReportProgress, silent
from fleetpulse.core.amendments import Histories, amend, content, corrections, histories, transitions
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import AMENDMENTS, Judgement, JudgementKind
from fleetpulse.core.replay import Deployment, Outcome
from fleetpulse.core.rows import Kind
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.core.times import format_instant
from fleetpulse.io.checkpoints.checkpoint import WATERMARK_DELAY_MS, judged_up_to
from fleetpulse.io.delta.corruption import open_table
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.amend_progress import AmendProgress, write_amend_progress
from fleetpulse.io.home.command_spool import devices_with_pending_commands, spool
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms
from fleetpulse.io.system.locks import named_lock
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables import tables
from fleetpulse.reports.device_judgements import judgements_by_device
from fleetpulse.reports.history.replay_origin import CAME_LATE, DONE, LAST_MS, StartingPoint, choose_origins

_AT_ONCE: Final = 500  # devices whose rows are in memory together
AMENDABLE: Final = f"(kind = '{JudgementKind.LATE}' OR (kind = '{JudgementKind.REFUSED}' AND message_kind = '{Kind.REGISTRY}'))"
_CONCERNED: Final = f"""
    SELECT device_id, epoch_ms(min(received_at)) AS first_ms FROM judgements
    WHERE {AMENDABLE} AND {LAST_MS} > ? AND epoch_ms(received_at) <= ? GROUP BY device_id ORDER BY device_id
"""


@dataclass(frozen=True, slots=True)
class AmendRequest:
    """Parameters of an amend run.

    Attributes:
        device_ids: devices to amend; empty for all with late messages.
        since_ms: least ``received_at`` of the late messages, epoch milliseconds; None: since the
            last run.
        dry_run: whether to report only and change nothing.
    """

    device_ids: tuple[str, ...] = ()
    since_ms: int | None = None
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Amended:
    """Result of amending one device.

    Attributes:
        device_id: id of the device.
        retracted: number of transitions retracted.
        added: number of transitions added.
        corrected: whether a correction row was sent for the device.
        left: reason why the device is not finished; None if its two histories are in the same
            state.
        final: whether further runs cannot finish the device, as bronze lacks the rows needed.
        effective_from_ms: event time at which the correction row takes effect, epoch milliseconds.
    """

    device_id: str
    retracted: int
    added: int
    corrected: bool
    left: str | None
    final: bool = False
    effective_from_ms: int | None = None


def amend_and_settle(
    home: Home, request: AmendRequest, judged: Callable[[int], bool], report: ReportProgress = silent
) -> list[Amended]:
    """Amend, see `amend_home`; amend again once the correction rows are in effect.

    A corrected device is finished only by the second run.

    Args:
        home: the home.
        request: parameters of the run.
        judged: function that waits until the frontier reaches an event time, epoch milliseconds,
            and returns whether it has.
        report: callback for progress lines.
    """
    first = amend_home(home, request, report)
    sent = [one.effective_from_ms for one in first if one.effective_from_ms is not None]
    if request.dry_run or not sent:
        return first
    report(f"waiting for the frontier to reach the corrections, {format_instant(max(sent))}")
    if not judged(max(sent)):
        return first
    done = {one.device_id: one for one in first}
    for one in amend_home(home, request, report):
        was = done.get(one.device_id, Amended(one.device_id, 0, 0, corrected=False, left=None))
        done[one.device_id] = replace(
            one,
            retracted=was.retracted + one.retracted,
            added=was.added + one.added,
            corrected=was.corrected or one.corrected,
        )
    return [done[device_id] for device_id in sorted(done)]


def amend_home(home: Home, request: AmendRequest, report: ReportProgress = silent) -> list[Amended]:
    """Amend the judgements of a home; return the result of each device processed.

    Args:
        home: the home; its jobs may run.
        request: parameters of the run.
        report: callback for progress lines, every few seconds and at the end.

    Raises:
        FleetError: another amend runs, the judgements table is of an older version, or `since_ms`
            is before the retention floor.
    """
    if request.since_ms is not None:
        _require_kept(home, request.since_ms)
    with named_lock(home.path / "amend.lock", "fleet amend", _refused):
        judged = judged_up_to(home.checkpoint)
        if judged is None or judged[1] <= WATERMARK_DELAY_MS or not holds_table(home.table(JUDGEMENTS.name)):
            return []
        _check_columns(home)
        through_ms, before_ms = judged[1], tables.landed(home, JUDGEMENTS, DONE)
        concerned = _concerned(home, request, before_ms, through_ms)
        counts = not (request.device_ids or request.dry_run or request.since_ms is not None)
        order = sorted(concerned, key=lambda device_id: (concerned[device_id], device_id))
        progress = Paced(report)
        if order:
            report(f"devices to amend: {len(order):,}")
        found = choose_origins(home, order, through_ms)
        done = {
            device_id: Amended(device_id, 0, 0, corrected=False, left=why, final=True) for device_id, why in found.why.items()
        }
        for origin, order in found.by_origin.items():
            for first in range(0, len(order), _AT_ONCE):
                group = _Group(order[first : first + _AT_ONCE], origin, found.why)
                done |= {one.device_id: one for one in _amend_some(home, group, through_ms, request)}
                if len(done) < len(concerned):
                    progress(partial("devices done: {:,} of {:,}".format, len(done), len(concerned)))
                unfinished_ms = [
                    at_ms for device_id, at_ms in concerned.items() if device_id not in done or _is_unmet(done[device_id])
                ]
                if (
                    counts and unfinished_ms and min(unfinished_ms) - 1 > before_ms
                ):  # record progress for a run that is interrupted
                    before_ms = min(unfinished_ms) - 1
                    tables.append_of(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, []), {DONE: before_ms})
        if concerned:
            report(f"devices done: {len(done):,} of {len(concerned):,}")
        if counts:
            unmet = sorted(one.device_id for one in done.values() if _is_unmet(one))
            last_ms = through_ms - 1  # more rows of the instant `through_ms` may follow
            done_ms = max(before_ms, min([last_ms, *(concerned[device_id] - 1 for device_id in unmet)]))
            write_amend_progress(home, AmendProgress(done_ms, through_ms, tuple(unmet)))
            if done_ms > before_ms:
                tables.append_of(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, []), {DONE: done_ms})
        return [done[device_id] for device_id in sorted(done)]


def _is_unmet(one: Amended) -> bool:
    return one.left is not None and not one.final


def _refused(other: str) -> FleetError:
    return FleetError(f"another amend is running: {other}; wait for its end, then try again if needed", code="amend-runs-already")


def _check_columns(home: Home) -> None:
    """Check that the judgements table has all columns.

    The job adds missing columns at its start. A column that is added while the job runs would make
    the job fail.
    """
    present = {field.name for field in open_table(home.table(JUDGEMENTS.name)).schema().fields}
    if absent := [column.name for column in JUDGEMENTS.columns if column.name not in present]:
        raise FleetError(
            f'the judgements of "{home.path}" were written by an older version: they lack {", ".join(absent)}; '
            f"start the fleet with this version first (./fleet up)",
            code="judgements-of-older-version",
        )


def _require_kept(home: Home, since_ms: int) -> None:
    """Check that bronze and the list of late messages are complete since an instant."""
    floors = ((oldest_kept_ms(home, MESSAGES.name), "keep_messages"), (oldest_kept_ms(home, CAME_LATE), "keep_late"))
    oldest_ms, setting = max((instant_ms or 0, setting) for instant_ms, setting in floors)
    if since_ms < oldest_ms:
        oldest = format_instant(oldest_ms)
        raise FleetError(
            f"amend --since needs complete messages, which are kept from {oldest} on (the setting {setting}); "
            f"got {format_instant(since_ms)}; name {oldest} or later, or restore a backup",
            code="amend-not-retained",
        )


def _concerned(home: Home, request: AmendRequest, before_ms: int, through_ms: int) -> dict[str, int]:
    """Return the devices to amend, with the ``received_at`` of the first late message."""
    if request.device_ids and request.since_ms is None:
        return dict.fromkeys(request.device_ids, 0)
    after_ms = before_ms if request.since_ms is None else request.since_ms - 1
    found = {one["device_id"]: one["first_ms"] for one in tables.query(home, _CONCERNED, [after_ms, through_ms])}
    return {one: first_ms for one, first_ms in found.items() if not request.device_ids or one in request.device_ids}


@dataclass(frozen=True, slots=True)
class _Group:
    """Devices that are amended together.

    Attributes:
        device_ids: ids of the devices.
        origin: origin of their histories.
        why: reasons, by device, why verdicts may not follow from that origin.
    """

    device_ids: Sequence[str]
    origin: StartingPoint
    why: Mapping[str, str]


def _amend_some(home: Home, group: _Group, through_ms: int, request: AmendRequest) -> list[Amended]:
    deployment, device_ids = home.deployment(), group.device_ids
    before = group.origin.outcome(home, device_ids)
    both = histories(group.origin.rows(home, device_ids, through_ms), deployment, before)
    emitted = judgements_by_device(home, device_ids)
    inconsistent = _inconsistent_devices(both, emitted, deployment)
    consistent = {
        one: [each for each in emitted[one] if each.kind in AMENDMENTS] for one in device_ids if one not in inconsistent
    }
    fresh = amend(both, consistent)
    if fresh and not request.dry_run:
        rows = [_row(one) for some in fresh.values() for one in some]
        tables.append_of(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), {})
    differing = [device_id for device_id in consistent if both.differ(device_id)]
    corrected, why = _correct(home, differing, group.origin, before, request) if differing else (dict[str, int](), "")
    kept_ms = oldest_kept_ms(home, MESSAGES.name)
    final = {device_id for device_id in inconsistent if _began_before(emitted[device_id], kept_ms)}
    inconsistent_why = {
        one: group.why[one] if one in final & group.why.keys() else _why_inconsistent(kept_ms) for one in inconsistent
    }
    left = {**dict.fromkeys(differing, why), **inconsistent_why}
    return [
        Amended(
            device_id,
            sum(one.kind is JudgementKind.RETRACT for one in fresh.get(device_id, [])),
            sum(one.kind is JudgementKind.ADD for one in fresh.get(device_id, [])),
            device_id in corrected,
            left.get(device_id),
            device_id in final,
            corrected.get(device_id),
        )
        for device_id in device_ids
    ]


def _inconsistent_devices(both: Histories, emitted: Mapping[str, Sequence[Judgement]], deployment: Deployment) -> set[str]:
    """Return the devices whose emitted transitions do not follow from bronze.

    Transitions that the verdict jitter may still delay are not compared.
    """
    defined = transitions(both.judged)

    def counted(device_id: str, some: Iterable[Judgement]) -> Counter[tuple[Any, ...]]:
        through_ms = both.through_ms(device_id)
        last_ms = -1 if through_ms is None else deployment.emitted_through_ms(through_ms)
        transition = (one for one in some if one.kind is JudgementKind.TRANSITION and both.is_after(one))
        judged = (one for one in transition if (one.event_time_ms or 0) <= last_ms)
        return Counter((one.transition_no, *content(one)) for one in judged)

    return {one for one, judgements in emitted.items() if counted(one, judgements) != counted(one, defined.get(one, []))}


def _began_before(emitted: Iterable[Judgement], kept_ms: int | None) -> bool:
    """Return whether a device has transitions from before the retention floor."""
    instants_ms = (one.event_time_ms for one in emitted if one.kind is JudgementKind.TRANSITION and one.event_time_ms is not None)
    return kept_ms is not None and min(instants_ms, default=kept_ms) < kept_ms


def _why_inconsistent(kept_ms: int | None) -> str:
    since = "" if kept_ms is None else f" ({format_instant(kept_ms)} and later)"
    return f"its verdicts do not follow from the rows that bronze still has{since}"


def _row(one: Judgement) -> Mapping[str, Any]:
    errors = json.dumps(one.last_errors) if one.last_errors else None
    return {**asdict(one), "last_errors": errors, "judged_at_ms": wall_clock_ms()}


def _correct(
    home: Home, device_ids: Sequence[str], origin: StartingPoint, before: Outcome, request: AmendRequest
) -> tuple[dict[str, int], str]:
    """Send correction rows for devices whose two histories differ.

    Returns:
        Event time at which the correction takes effect, by device; and the remaining action.
    """
    idle = sorted({*device_ids} - devices_with_pending_commands(home))
    found = corrections(origin.rows(home, idle, None), home.deployment(), idle, before)
    if found is None:
        return {}, "no bridge is listening, so no correction can take effect: amend again after the coverage gap"
    if found and not request.dry_run:
        spool(home, [(one.topic, one.payload) for one in found])
    effective = {one.device_id: int(one.payload["effective_from"]) for one in found}
    return effective, "its correction takes effect when the frontier reaches it: amend again then"
