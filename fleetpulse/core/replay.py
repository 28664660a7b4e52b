"""The definition: a verdict is a pure function of the rows received.

``replay`` reads all rows at once. The stream must say the same, however its rows were cut into batches and
however often it was killed; the laws in ``tests/property`` compare the two.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from fleetpulse.core.fold import Device, EvaluationContext, Fold, settle
from fleetpulse.core.judgements import Judgement, JudgementKind, about, clock_behind
from fleetpulse.core.policy import MAX_AHEAD, Dated, Policies, PolicyFault, from_row
from fleetpulse.core.presence.coverage import MAX_DEAF
from fleetpulse.core.presence.presence_time import present, trusted
from fleetpulse.core.presence.shards import Advance, Scope, Shards
from fleetpulse.core.rows import FOR_EVERYONE, RANK, SIGNALS, Identity, Kind, Row, Trust, for_everyone, identity, order

AMENDED: Final = SIGNALS | {Kind.REGISTRY}  # what an amended history takes as on time


@dataclass(frozen=True, slots=True)
class Deployment:
    """What belongs to an installation, not to its policy. Durations in milliseconds.

    Attributes:
        allowed_lateness_ms: how late a message may come and still be judged; at least a second.
        max_clock_lead_ms: how far ahead of us a device's clock may be.
        max_backlog_ms: how old a message may be: what is older has a clock that is not set.
        verdict_jitter_ms: over how long the verdicts of one deadline are spread, when they are written; 0 writes at once.
    """

    allowed_lateness_ms: int = 60_000
    max_clock_lead_ms: int = 300_000
    verdict_jitter_ms: int = 0
    max_backlog_ms: int = 31 * 86_400_000

    def said_through_ms(self, frontier_ms: int) -> int:
        """Return up to which event time nothing is held back of what was judged up to a frontier."""
        return frontier_ms - self.verdict_jitter_ms


@dataclass(slots=True)
class LatenessFilter:
    """Reads rows in the order of their ``received_at``: what they say about us, and which of them wait to be judged.

    Attributes:
        deployment: lateness and clock lead.
        shards: coverage and frontier of every site; None before the first row.
        policies: those known so far.
        judgements: on messages that came late, and on rows that cannot take effect.
        amending: take messages, and entries of the registry, as on time that are not; rows that correct say nothing then.
        begun_ms: the frontier with which it begins: what happened up to there is not judged anew; None before the first row.
    """

    deployment: Deployment
    shards: Shards | None
    policies: Policies
    judgements: list[Judgement]
    amending: bool = False
    begun_ms: int | None = None

    def read(self, row: Row) -> list[Row]:
        """Take in one row; return it with its presence time if it belongs to a device and is pending.

        In an amended history a late signal counts twice: its data at its event time, its presence at ``received_at``.
        """
        shards = self.shards or Shards.begin(row.received_at_ms)
        if row.is_for_everyone:
            return [row]  # a copy of a row that is read itself
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
        """Return a signal at its presence time; list it where it came late."""
        deployment = self.deployment
        trust = trusted(row, frontier_ms, deployment.max_clock_lead_ms, deployment.max_backlog_ms)
        if trust is not Trust.LATE:
            return [present(row, trust)]
        assert frontier_ms is not None and row.event_time_ms is not None, "a late row lies at or before the frontier"
        if self._amends(row.kind, row.event_time_ms):
            return [present(row, trust), present(row, Trust.ON_TIME)]
        reason = clock_behind(row.event_time_ms - row.received_at_ms)
        self.judgements.append(about(row, JudgementKind.LATE, reason, frontier_ms - row.event_time_ms))
        return [present(row, trust)]

    def _gap(self, shards: Shards, row: Row) -> Shards:
        content = row.contents()
        operation, since_ms, until_ms = content.get("op"), content.get("from"), content.get("until")
        if operation == "open" and type(since_ms) is int:
            shards = shards.read(read_before(row), self.deployment.allowed_lateness_ms)
            if not shards.has_room_for(row.device_id):
                reason = f"at most {MAX_DEAF:,} bridges do not listen at the same time; the gap of the others goes on without it"
                self.judgements.append(about(row, JudgementKind.REFUSED, reason))
                return shards
            return shards.open_gap(row.received_at_ms, since_ms, row.device_id, Scope.of_gap(content))
        if operation == "close" and type(until_ms) is int:
            return shards.close_gap(row.received_at_ms, until_ms, row.device_id)
        self.judgements.append(about(row, JudgementKind.REFUSED, "a gap row opens from an instant or closes until one"))
        return shards

    def _policy(self, shards: Shards, row: Row) -> None:
        """Add a policy that takes effect after every frontier; those that a shard still needs are counted."""
        assert row.event_time_ms is not None
        if not self._in_time(shards.frontier_ms, row):
            return
        try:
            policy = from_row(row.contents().get("policy"))
        except PolicyFault as fault:
            self.judgements.append(about(row, JudgementKind.REFUSED, str(fault)))
            return
        least_ms = shards.least_frontier_ms
        said_ms = None if least_ms is None else self.deployment.said_through_ms(least_ms)
        if self.policies.after(said_ms) >= MAX_AHEAD:
            reason = f"at most {MAX_AHEAD:,} policies wait to take effect; give it again when some have"
            self.judgements.append(about(row, JudgementKind.REFUSED, reason))
            return
        dated = Dated(row.event_time_ms, row.received_at_ms, policy.version, policy)
        self.policies = self.policies.including(dated)

    def _in_time(self, frontier_ms: int | None, row: Row) -> bool:
        """Whether a will or a row of ours may still act; if not, it is listed as refused."""
        assert row.event_time_ms is not None, "a will counts when it is received, and a row of ours names an instant"
        if frontier_ms is None or row.event_time_ms > frontier_ms or self._amends(row.kind, row.event_time_ms):
            return True
        self.judgements.append(about(row, JudgementKind.REFUSED, "effective_from lies in what has been judged"))
        return False

    def _amends(self, kind: Kind, event_time_ms: int) -> bool:
        return self.amending and kind in AMENDED and (self.begun_ms is None or event_time_ms > self.begun_ms)


def arrival(row: Row) -> tuple[int, bool, int, int, int]:
    """Return the key by which rows are read: ``received_at``, with a fixed order among equals.

    Gaps first, and of those that open at one instant first the one that says the earlier instant before it: where their bridges'
    rows came in by one line they may have been judged one after the other, and the later one says so.
    """
    after_ms = row.contents().get("after") if row.kind is Kind.GAP else None
    read_ms = after_ms if type(after_ms) is int else -1
    return (row.received_at_ms, row.kind is not Kind.GAP, read_ms, -RANK[row.kind], row.digest)


def read_before(gap: Row) -> int:
    """Return the ``received_at`` of the row before one that opens a gap, which a key group may not have had; 0 where unknown."""
    content = gap.contents()
    after_ms = content.get("after")
    return min(after_ms, gap.received_at_ms) if content.get("op") == "open" and type(after_ms) is int else 0


def in_order(due: Iterable[Row], due_at: Callable[[Row], int] = lambda _: 0) -> tuple[list[Row], list[Judgement]]:
    """Return the rows of a device in the order in which they are judged, and what is said of copies.

    Of copies that become due at one instant the one received first counts; one call sees them together.

    Args:
        due: the rows.
        due_at: returns the ``received_at`` at which a row becomes due, where they are of several shards.
    """
    first: dict[tuple[Identity, int], Row] = {}
    copies: list[Judgement] = []
    for row in sorted(due, key=lambda each: (each.arrival, each.code or "", each.site, each.gateway or "")):
        is_copy = first.setdefault((identity(row), due_at(row)), row) is not row
        if is_copy and row.trust is not Trust.LATE:  # that is listed already
            copies.append(about(row, JudgementKind.DUPLICATE))
    return sorted(first.values(), key=order), copies


def with_gateways(ordered: Sequence[Row], events: Iterable[Row], *gateways: str | None) -> list[Row]:
    """Return a device's rows, in their order, with deaths and returns of its gateways: of one instant its own come first.

    Args:
        ordered: see `in_order`.
        events: see `for_everyone`; of any gateway.
        gateways: the one that it had before.
    """
    named = {*gateways, *(_names_gateway(row) for row in ordered)}
    its = sorted((event for event in events if event.gateway in named), key=lambda row: row.arrival)
    return sorted([*ordered, *its], key=lambda row: row.at_ms)  # stable: of one instant they keep their order


def _names_gateway(row: Row) -> str | None:
    if row.kind not in (Kind.REGISTRY, Kind.CORRECT):
        return row.gateway
    content = row.contents()
    told: Any = content.get("device") if row.kind is Kind.CORRECT else content
    gateway: Any = cast("Mapping[str, Any]", told).get("gateway") if isinstance(told, Mapping) else None
    return gateway if isinstance(gateway, str) else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a history comes to.

    Attributes:
        judgements: every judgement.
        devices: the devices with a state at the frontier, by id.
        waiting: the pending rows, gateway events for everyone among them.
        shards: coverage and frontier of every site; None without rows.
        policies: the policies known.
    """

    judgements: list[Judgement]
    devices: dict[str, Device]
    waiting: list[Row]
    shards: Shards | None
    policies: Policies

    @property
    def frontier_ms(self) -> int | None:
        """Up to which event time was judged where most was; None before the first row was."""
        return self.shards.frontier_ms if self.shards is not None else None


NOTHING: Final = Outcome([], {}, [], None, Policies())  # what no rows come to


def outcome(
    rows: Iterable[Row],
    deployment: Deployment,
    *,
    begun: Outcome = NOTHING,
    amending: bool = False,
    through_ms: int | None = None,
    through_site: str | None = None,
) -> Outcome:
    """Judge a history up to its frontier.

    Args:
        rows: in any order; ``received_at`` says in which they count.
        deployment: lateness and clock lead.
        begun: what the rows before them came to; its judgements are not said again.
        amending: take messages as on time that are late, see `LatenessFilter`; not those from before the frontier of ``begun``.
        through_ms: judge up to there instead, as if the frontier had come so far and nothing else were received.
        through_site: the site whose frontier that is; None: of every site.
    """
    intake = LatenessFilter(deployment, begun.shards, begun.policies, [], amending, begun.frontier_ms)
    pending = [row for row in begun.waiting if not (amending and row.kind is Kind.CORRECT)]
    kept, advances, since = sorted(rows, key=arrival), list[Advance](), begun.shards
    cuts = {*cuts_at_gaps(kept, begun.shards)}
    for at, row in enumerate(kept):
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
    fold, devices = Fold(EvaluationContext(intake.shards, intake.policies), intake.judgements), dict(begun.devices)
    for advance in advances:
        fold.world = EvaluationContext(advance.shards, intake.policies)
        devices = _judged(fold, devices, pending, advance)
    waiting = [row for row in pending if _waits(row, advances[-1].shards)]
    return Outcome(fold.judgements, devices, waiting, intake.shards, intake.policies)


def cuts_at_gaps(rows: Sequence[Row], begun: Shards | None) -> list[int]:
    """Return the places of gap rows from the first on that concerns some sites: coverage stays the same between two of them.

    Args:
        rows: in the order of `arrival`.
        begun: coverage and frontiers before them.
    """
    gaps = [at for at, row in enumerate(rows) if row.kind is Kind.GAP]
    if begun is None or len(begun) == 1:
        scoped = (place for place, at in enumerate(gaps) if Scope.of_gap(rows[at].contents()).sites)
        gaps = gaps[next(scoped, len(gaps)) :]
    return gaps


def _judged(fold: Fold, begun: Mapping[str, Device], pending: Sequence[Row], advance: Advance) -> dict[str, Device]:
    """Return the devices after the rows that have become due."""
    by_device: dict[str, list[Row]] = {device_id: [] for device_id in begun}
    for row in pending:
        if not row.is_for_everyone and advance.is_due(row, advance.shards.number(row.site)):
            by_device.setdefault(row.device_id, []).append(row)
    events = [row for row in pending if row.is_for_everyone]
    devices: dict[str, Device] = {}
    for device_id, due in by_device.items():
        known = replace(begun[device_id]) if device_id in begun else None
        device = run_due(fold, known, due, events, advance)
        frontier_ms = advance.shards.of(device.current_site).frontier_ms if device is not None else None
        device = device if frontier_ms is None else fold.expire(device, frontier_ms + 1)
        if device is not None:
            if (least_ms := advance.shards.least_frontier_ms) is not None:
                settle(device, least_ms)
            devices[device_id] = device
    return devices


def _waits(row: Row, shards: Shards) -> bool:
    """Whether the frontier has not come to a row; a gateway event waits for each shard."""
    frontier_ms = shards.least_frontier_ms if row.is_for_everyone else shards.of(row.site).frontier_ms
    return frontier_ms is None or row.at_ms > frontier_ms


def run_due(fold: Fold, device: Device | None, due: Sequence[Row], events: Iterable[Row], advance: Advance) -> Device | None:
    """Judge rows of a device that are due, and gateway events, silence acting between them.

    Args:
        fold: takes the judgements.
        device: as it is; None where it is unknown.
        due: its rows, in any order, copies among them.
        events: see `for_everyone`; of any gateway, due or not.
        advance: how far the frontiers have moved.
    """
    shards = advance.shards
    ordered, copies = in_order(due, advance.due_at) if len(shards) > 1 else in_order(due)
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
    mine = [event for event in events if advance.is_due(event, shard)]
    return fold.run(device, with_gateways(ordered, mine, gateway), None)


def replay(rows: Iterable[Row], deployment: Deployment) -> list[Judgement]:
    """Return every judgement that follows from ``rows``, in no particular order."""
    return outcome(rows, deployment).judgements


__all__ = ["AMENDED", "NOTHING", "Deployment", "LatenessFilter", "Outcome", "arrival", "in_order", "outcome", "replay", "run_due"]
