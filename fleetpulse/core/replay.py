"""Reference implementation: verdicts as a pure function of the rows received.

`replay` reads all rows at once. The stream must emit the same judgements, however its rows were cut
into batches and however often it was killed. The tests in ``tests/property`` compare the two.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from fleetpulse.core.device import Device, EvaluationContext
from fleetpulse.core.fold import Fold
from fleetpulse.core.judgements import Judgement, JudgementKind, clock_behind, message_judgement
from fleetpulse.core.policy import MAX_AHEAD, Dated, Policies, PolicyFault, from_row
from fleetpulse.core.presence.coverage import MAX_DEAF
from fleetpulse.core.presence.presence_time import classify_event_time, with_presence_time
from fleetpulse.core.presence.shards import Advance, Scope, Shards
from fleetpulse.core.rows import FOR_EVERYONE, RANK, SIGNALS, Identity, Kind, Row, Trust, for_everyone, identity, order
from fleetpulse.core.signals import drop_settled_arrivals
from fleetpulse.core.times import DAY_MS

AMENDED: Final = SIGNALS | {Kind.REGISTRY}  # an amended history takes these rows as on time


@dataclass(frozen=True, slots=True)
class Deployment:
    """Settings of an installation that affect judging. Durations in milliseconds.

    Attributes:
        allowed_lateness_ms: allowed lateness of a message: covered time by which the frontier is behind
            the newest ``received_at``; at least one second. `classify_event_time` finds late signals.
        max_clock_lead_ms: longest lead of a device's clock over ``received_at``; above it, the
            signal has a clock fault.
        max_backlog_ms: greatest age of a message when it is received; above it, the signal has a
            clock fault: the clock is not set.
        verdict_jitter_ms: span over which the verdicts of one deadline are spread when they are
            written; 0 writes them at once.
    """

    allowed_lateness_ms: int = 60_000
    max_clock_lead_ms: int = 300_000
    verdict_jitter_ms: int = 0
    max_backlog_ms: int = 31 * DAY_MS

    def emitted_through_ms(self, frontier_ms: int) -> int:
        """Return the event time up to which all verdicts are emitted at a frontier."""
        return frontier_ms - self.verdict_jitter_ms


@dataclass(slots=True)
class LatenessFilter:
    """Intake of rows in the order of ``received_at``.

    It moves coverage and frontiers, collects policies, lists late messages, and returns pending
    rows.

    Attributes:
        deployment: settings of the installation.
        shards: coverage and frontier of every site; None before the first row.
        policies: policies read so far.
        judgements: judgements about late messages and about rows that cannot take effect.
        amending: whether late messages and late registry entries count as on time, and correction
            rows are ignored.
        begun_ms: frontier at the start, epoch milliseconds: nothing up to it is judged again; None
            before the first row.
    """

    deployment: Deployment
    shards: Shards | None
    policies: Policies
    judgements: list[Judgement]
    amending: bool = False
    begun_ms: int | None = None

    def read(self, row: Row) -> list[Row]:
        """Process one row; return it with its presence time if it is pending.

        Gap rows, policies and ticks concern no device, so they are not returned. In an amended
        history a late signal is returned twice: its data count at its event time, its presence at
        ``received_at``.
        """
        shards = self.shards or Shards.begin(row.received_at_ms)
        if row.is_for_everyone:
            return [row]  # the row that it is derived from is read separately
        if row.kind is Kind.GAP:
            shards = self._gap(shards, row)
        self.shards = shards = shards.read(row.received_at_ms, self.deployment.allowed_lateness_ms)
        if row.kind is Kind.POLICY:
            self._policy(shards, row)
        frontier_ms = shards.of(row.site).frontier_ms
        if row.kind in SIGNALS:
            return self._signal(frontier_ms, row)
        if self.amending and row.kind is Kind.CORRECT:
            return []
        return [row] if row.kind not in FOR_EVERYONE and self._in_time(frontier_ms, row) else []

    def _signal(self, frontier_ms: int | None, row: Row) -> list[Row]:
        """Return a signal with its presence time; list it if it is late."""
        deployment = self.deployment
        trust = classify_event_time(row, frontier_ms, deployment.max_clock_lead_ms, deployment.max_backlog_ms)
        if trust is not Trust.LATE:
            return [with_presence_time(row, trust)]
        assert frontier_ms is not None and row.event_time_ms is not None, "a late row lies at or before the frontier"
        if self._amends(row.kind, row.event_time_ms):
            return [with_presence_time(row, trust), with_presence_time(row, Trust.ON_TIME)]
        reason = clock_behind(row.event_time_ms - row.received_at_ms)
        self.judgements.append(message_judgement(row, JudgementKind.LATE, reason, frontier_ms - row.event_time_ms))
        return [with_presence_time(row, trust)]

    def _gap(self, shards: Shards, row: Row) -> Shards:
        content = row.contents()
        operation, since_ms, until_ms = content.get("op"), content.get("from"), content.get("until")
        if operation == "open" and type(since_ms) is int:
            shards = shards.read(read_before(row), self.deployment.allowed_lateness_ms)
            if not shards.has_room_for(row.device_id):
                reason = f"at most {MAX_DEAF:,} bridges can have an open gap; this one was not recorded"
                self.judgements.append(message_judgement(row, JudgementKind.REFUSED, reason))
                return shards
            return shards.open_gap(row.received_at_ms, since_ms, row.device_id, Scope.of_gap(content))
        if operation == "close" and type(until_ms) is int:
            return shards.close_gap(row.received_at_ms, until_ms, row.device_id)
        self.judgements.append(
            message_judgement(row, JudgementKind.REFUSED, "a gap row must be an open with from, or a close with until")
        )
        return shards

    def _policy(self, shards: Shards, row: Row) -> None:
        """Add a policy; refuse it if invalid, not after every frontier, or beyond `MAX_AHEAD`."""
        assert row.event_time_ms is not None
        if not self._in_time(shards.frontier_ms, row):
            return
        try:
            policy = from_row(row.contents().get("policy"))
        except PolicyFault as fault:
            self.judgements.append(message_judgement(row, JudgementKind.REFUSED, str(fault)))
            return
        least_ms = shards.least_frontier_ms
        emitted_ms = None if least_ms is None else self.deployment.emitted_through_ms(least_ms)
        if self.policies.after(emitted_ms) >= MAX_AHEAD:
            reason = f"at most {MAX_AHEAD:,} policies can be pending; send it again later"
            self.judgements.append(message_judgement(row, JudgementKind.REFUSED, reason))
            return
        dated = Dated(row.event_time_ms, row.received_at_ms, policy.version, policy)
        self.policies = self.policies.including(dated)

    def _in_time(self, frontier_ms: int | None, row: Row) -> bool:
        """Whether a will or a row of a reserved kind is in time; if not, refuse it."""
        assert row.event_time_ms is not None, "a will counts when it is received; a row of a reserved kind names an instant"
        if frontier_ms is None or row.event_time_ms > frontier_ms or self._amends(row.kind, row.event_time_ms):
            return True
        self.judgements.append(message_judgement(row, JudgementKind.REFUSED, "effective_from must lie beyond the frontier"))
        return False

    def _amends(self, kind: Kind, event_time_ms: int) -> bool:
        return self.amending and kind in AMENDED and (self.begun_ms is None or event_time_ms > self.begun_ms)


def arrival(row: Row) -> tuple[int, bool, int, int, int]:
    """Return the sort key of rows by arrival: ``received_at``, then a fixed order.

    At the same instant gap rows come first, in the order of ``after``, the ``received_at`` of the row
    before. If their bridges share one stream, two gap rows may have been judged one after the other.
    The one judged later then has the greater ``after``.
    """
    after_ms = row.contents().get("after") if row.kind is Kind.GAP else None
    read_ms = after_ms if type(after_ms) is int else -1
    return (row.received_at_ms, row.kind is not Kind.GAP, read_ms, -RANK[row.kind], row.digest)


def read_before(gap: Row) -> int:
    """Return the ``received_at`` of the row before a gap row that opens a gap; 0 if unknown.

    The gap row states it, since not every key group has received the row before.
    """
    content = gap.contents()
    after_ms = content.get("after")
    return min(after_ms, gap.received_at_ms) if content.get("op") == "open" and type(after_ms) is int else 0


def judging_order(due: Iterable[Row], due_at: Callable[[Row], int] = lambda _: 0) -> tuple[list[Row], list[Judgement]]:
    """Return the rows of a device in judging order, and the judgements about copies.

    Of copies that become due at one instant, the one received first counts. One call must receive
    all of them.

    Args:
        due: rows of one device.
        due_at: function to the ``received_at`` at which a row becomes due, if the rows belong to
            several shards.
    """
    first: dict[tuple[Identity, int], Row] = {}
    copies: list[Judgement] = []
    for row in sorted(due, key=lambda each: (each.arrival, each.code or "", each.site, each.gateway or "")):
        is_copy = first.setdefault((identity(row), due_at(row)), row) is not row
        if is_copy and row.trust is not Trust.LATE:  # a late copy is listed already
            copies.append(message_judgement(row, JudgementKind.DUPLICATE))
    return sorted(first.values(), key=order), copies


def with_gateways(ordered: Sequence[Row], events: Iterable[Row], *gateways: str | None) -> list[Row]:
    """Merge the rows of a device with the deaths and returns of its gateways.

    At the same instant the rows of the device come first.

    Args:
        ordered: rows of the device, as `judging_order` returns them.
        events: events of any gateways, as `for_everyone` returns them.
        gateways: gateways that the device had before these rows.
    """
    named = {*gateways, *(_names_gateway(row) for row in ordered)}
    gateway_events = sorted((event for event in events if event.gateway in named), key=lambda row: row.arrival)
    return sorted([*ordered, *gateway_events], key=lambda row: row.at_ms)  # stable: rows of one instant keep their order


def _names_gateway(row: Row) -> str | None:
    if row.kind not in (Kind.REGISTRY, Kind.CORRECT):
        return row.gateway
    content = row.contents()
    entry: Any = content.get("device") if row.kind is Kind.CORRECT else content
    gateway: Any = cast("Mapping[str, Any]", entry).get("gateway") if isinstance(entry, Mapping) else None
    return gateway if isinstance(gateway, str) else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of judging a history up to its frontier.

    Attributes:
        judgements: all judgements.
        devices: devices that have a state at the frontier, by id.
        pending: pending rows, including gateway events for all key groups.
        shards: coverage and frontier of every site; None without rows.
        policies: policies read.
    """

    judgements: list[Judgement]
    devices: dict[str, Device]
    pending: list[Row]
    shards: Shards | None
    policies: Policies

    @property
    def frontier_ms(self) -> int | None:
        """Greatest frontier of any site, epoch milliseconds; None if there is none yet."""
        return self.shards.frontier_ms if self.shards is not None else None


EMPTY_OUTCOME: Final = Outcome([], {}, [], None, Policies())  # outcome of an empty history


def outcome(
    rows: Iterable[Row],
    deployment: Deployment,
    *,
    initial: Outcome = EMPTY_OUTCOME,
    amending: bool = False,
    through_ms: int | None = None,
    through_site: str | None = None,
    make_fold: Callable[[EvaluationContext, list[Judgement]], Fold] = Fold,
) -> Outcome:
    """Judge a history up to its frontier.

    Args:
        rows: rows in any order; they are read in the order of `arrival`.
        deployment: settings of the installation.
        initial: outcome of the rows before them; its judgements are not emitted again.
        amending: whether late messages count as on time, see `LatenessFilter`, except messages from
            before the frontier of ``initial``.
        through_ms: instant to judge up to, epoch milliseconds, as if the frontier had reached it
            and no other row were received; None: the frontier that follows from the rows.
        through_site: site that has ``through_ms`` as its frontier; None: every site.
        make_fold: function that creates the fold, such as one that also records its steps.
    """
    intake = LatenessFilter(deployment, initial.shards, initial.policies, [], amending, initial.frontier_ms)
    pending = [row for row in initial.pending if not (amending and row.kind is Kind.CORRECT)]
    ordered, advances, since = sorted(rows, key=arrival), list[Advance](), initial.shards
    cuts = {*cuts_at_gaps(ordered, initial.shards)}
    for at, row in enumerate(ordered):
        if at in cuts and intake.shards is not None:
            intake.shards = intake.shards.read(read_before(row), deployment.allowed_lateness_ms)
            advances.append(Advance.between(since, intake.shards, deployment.allowed_lateness_ms))
            since = intake.shards
        pending += intake.read(row)
        pending += [event] if (event := for_everyone(row)) else []
    if intake.shards is None:
        return Outcome([], {}, [], None, intake.policies)
    advances.append(Advance.between(since, intake.shards, deployment.allowed_lateness_ms))
    if through_ms is not None:
        advances = [*(one.up_to(through_ms) for one in advances[:-1]), advances[-1].judged_to(through_ms, through_site)]
    fold, devices = make_fold(EvaluationContext(intake.shards, intake.policies), intake.judgements), dict(initial.devices)
    for advance in advances:
        fold.context = EvaluationContext(advance.shards, intake.policies)
        devices = _judged(fold, devices, pending, advance)
    waiting = [row for row in pending if _waits(row, advances[-1].shards)]
    return Outcome(fold.judgements, devices, waiting, intake.shards, intake.policies)


def cuts_at_gaps(rows: Sequence[Row], initial: Shards | None) -> list[int]:
    """Return the indexes of gap rows, starting with the first that names its sites.

    Coverage is constant between two of them. With several shards before the rows, return all gap rows.

    Args:
        rows: rows in the order of `arrival`.
        initial: coverage and frontiers before the rows; None if there are none.
    """
    gaps = [at for at, row in enumerate(rows) if row.kind is Kind.GAP]
    if initial is None or len(initial) == 1:
        scoped = (place for place, at in enumerate(gaps) if Scope.of_gap(rows[at].contents()).sites)
        gaps = gaps[next(scoped, len(gaps)) :]
    return gaps


def _judged(fold: Fold, initial: Mapping[str, Device], pending: Sequence[Row], advance: Advance) -> dict[str, Device]:
    """Return the devices after judging the rows that have become due."""
    by_device: dict[str, list[Row]] = {device_id: [] for device_id in initial}
    for row in pending:
        if not row.is_for_everyone and advance.is_due(row, advance.shards.number(row.site)):
            by_device.setdefault(row.device_id, []).append(row)
    events = [row for row in pending if row.is_for_everyone]
    devices: dict[str, Device] = {}
    for device_id, due in by_device.items():
        known = replace(initial[device_id]) if device_id in initial else None
        device = run_due(fold, known, due, events, advance)
        frontier_ms = advance.shards.of(device.current_site).frontier_ms if device is not None else None
        device = device if frontier_ms is None else fold.expire(device, frontier_ms + 1)
        if device is not None:
            if (least_ms := advance.shards.least_frontier_ms) is not None:
                drop_settled_arrivals(device, least_ms)
            devices[device_id] = device
    return devices


def _waits(row: Row, shards: Shards) -> bool:
    """Whether a row is still pending; a gateway event is pending until it is due in every shard."""
    frontier_ms = shards.least_frontier_ms if row.is_for_everyone else shards.of(row.site).frontier_ms
    return frontier_ms is None or row.at_ms > frontier_ms


def run_due(fold: Fold, device: Device | None, due: Sequence[Row], events: Iterable[Row], advance: Advance) -> Device | None:
    """Judge the due rows of a device and gateway events; fire deadlines between them.

    Args:
        fold: fold that collects the judgements.
        device: state before the rows; None if the device is unknown.
        due: due rows of the device in any order, including copies.
        events: events of any gateways, due or not, as `for_everyone` returns them.
        advance: movement of the frontiers.

    Returns:
        The state afterwards; None if the device is unknown or forgotten.
    """
    shards = advance.shards
    ordered, copies = judging_order(due, advance.due_at) if len(shards) > 1 else judging_order(due)
    fold.judgements += copies
    numbers = {shards.number(row.site) for row in ordered}
    numbers |= {shards.number(device.current_site)} if device else set[int]()
    gateway = device.gateway if device else None
    if len(shards) > 1:
        of_gateways = with_gateways([], events, gateway, *(_names_gateway(row) for row in ordered))
        in_shards = advance.in_order(ordered, of_gateways, numbers)
        if len(numbers) > 1 or (device is not None and any(due.row.at_ms < device.last_fact_ms for due in in_shards)):
            return fold.run_across(device, in_shards, advance)
    shard = min(numbers, default=0)
    due_events = [event for event in events if advance.is_due(event, shard)]
    return fold.run(device, with_gateways(ordered, due_events, gateway), None)


def replay(rows: Iterable[Row], deployment: Deployment) -> list[Judgement]:
    """Return all judgements that follow from ``rows``, in no particular order."""
    return outcome(rows, deployment).judgements


__all__ = [
    "AMENDED",
    "EMPTY_OUTCOME",
    "Deployment",
    "LatenessFilter",
    "Outcome",
    "arrival",
    "judging_order",
    "outcome",
    "replay",
    "run_due",
]
