"""Reference facts for the suites: position of the job, derived rows, deadlines.

Rule 1: facts are derived from bronze by the reference definition (`core.replay`, `core.fold`),
never from the rows under test.
Rule 2: the position of the job is read before the tables are opened, and the landed rows are read
after that, as the job may be running.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from batch.quality.rejudge import Origin, ever_current, origin_of
from fleetpulse.columnar.codec.context_json import context_from_plain
from fleetpulse.columnar.snapshot.rows import GROUP, OWN_ROW, shared_context
from fleetpulse.core.catalog import TABLES
from fleetpulse.core.deadlines import next_due
from fleetpulse.core.device import Device, EvaluationContext
from fleetpulse.core.errors import FleetError
from fleetpulse.core.lifecycle import HELD, Mode
from fleetpulse.core.policy import Policies
from fleetpulse.core.presence.coverage import Coverage
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.registry.registry import ADD
from fleetpulse.core.replay import Outcome, outcome
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES, QUARANTINE
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.checkpoints.generations import Generations, load_generations
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms
from fleetpulse.io.quality.suite_inputs import OpenedTables
from fleetpulse.io.tables import tables as delta
from fleetpulse.io.tables.snapshots import SnapshotInfo
from fleetpulse.reports.messages import rows_through, span

_INSTANT: Final = pa.timestamp("us", tz="UTC")
_BEFORE_ALL: Final = 0
_AT_A_TIME: Final = 10_000
_LISTED: Final = "late"  # retention floor of judgements about messages that were not judged
_SILENCES: Final = """
    SELECT * FROM (
        SELECT device_id, life, transition_no, event_time, last_seen, device_class, trigger,
            epoch_ms(event_time) AS at_ms, epoch_ms(last_seen) AS seen_ms, epoch_ms(life) AS life_ms,
            epoch_ms(lag(event_time) OVER life_so_far) AS since_ms, site, gateway,
            lag(gateway) OVER life_so_far AS gateway_before,
            epoch_ms(max(CASE WHEN trigger = 'registered' THEN event_time END) OVER earlier) AS registered_ms
        FROM judgements WHERE kind = 'transition'
            AND event_time <= (SELECT frontier FROM job)
            AND device_id NOT IN (SELECT device_id FROM messages WHERE kind = 'correct')
            AND device_id NOT IN (SELECT device_id FROM roaming)
        WINDOW life_so_far AS (PARTITION BY device_id, life ORDER BY transition_no),
            earlier AS (PARTITION BY device_id, life ORDER BY transition_no ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
        AS silent
    WHERE trigger = 'silence' AND event_time > (SELECT replayed_after FROM job)
        AND coalesce(last_seen, life, event_time) >= (SELECT greatest(retained_since, replayed_after) FROM job)
        AND NOT EXISTS (SELECT 1 FROM messages AS other WHERE other.gateway_event IS NOT NULL
            AND other.device_id IN (silent.gateway, silent.gateway_before) AND other.received_at <= silent.event_time
            AND other.received_at >= coalesce(silent.last_seen, silent.life))
"""
_OWN: Final = "SELECT device_id, epoch_ms(event_time) AS at_ms, body FROM messages WHERE kind IN ('registry', 'control')"
_ENTRIES: Final = """
    SELECT device_id, epoch_ms(event_time) AS at_ms, body FROM messages WHERE kind = 'registry' AND NOT EXISTS (
        SELECT 1 FROM judgements AS refused WHERE refused.kind = 'refused' AND refused.message_kind = 'registry'
        AND refused.device_id = messages.device_id AND refused.received_at = messages.received_at
        AND refused.event_time IS NOT DISTINCT FROM messages.event_time)
    ORDER BY event_time, received_at
"""
_DUE: Final = """
    SELECT device_id, site, speaks_from, device_class, mode, epoch_ms(mode_since) AS mode_since_ms, epoch_ms(life) AS life_ms,
        epoch_ms(class_since) AS class_since_ms, epoch_ms(quiet_since) AS quiet_since_ms, quiet_covered_ms,
        epoch_ms(degraded_until) AS degraded_until_ms, epoch_ms(flagged_until) AS flagged_until_ms,
        epoch_ms(held_until) AS held_until_ms, epoch_ms(death) AS death_ms, death_covered_ms,
        epoch_ms(outage) AS outage_ms, outage_covered_ms, coalesce(excused_ms, 0) AS excused_ms, timeout_ms, death_grace_ms,
        TRY_CAST(errors ->> '$.review_ms' AS BIGINT) AS review_ms,
        TRY_CAST(errors ->> '$.confirmed_ms' AS BIGINT) AS confirmed_ms
    FROM state WHERE part = 'device' AND mode IS NOT NULL AND quiet_since IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """Position of the job, or of a state. Instants are epoch milliseconds.

    Attributes:
        newest_ms: ``received_at`` of the newest row judged.
        context: coverage and policies.
        frontier_ms: greatest frontier of all shards.
        settled_ms: instant up to which no shard holds a verdict back.
        other_sites_frontier_ms: frontier of the sites that no gap row names.
        least_frontier_ms: least frontier of all shards.
        held_back_ms: longest time that a verdict is held back.
        retained_since_ms: retention floor of bronze.
        listed_since_ms: retention floor of judgements about messages that were not judged, by
            ``received_at`` and by event time.
        origin: origin from which bronze can be judged again up to this position; None if there is
            none.
        has_all_lines: whether bronze and quarantine have all lines of all recordings.
        has_listed_devices: whether some devices were bootstrapped from a list; no transitions of
            their past were emitted.
        own_limits: whether such a list gave some devices limits of their own.
        was_rolled_back: whether a generation with a part of the devices was rolled back. Messages
            of the other devices were then judged later, in their earlier lives, and nothing was
            emitted.
        lead_ms: maximum clock lead of a device.
        backlog_ms: maximum age of a message.
        has_late_rules: whether a policy sets ``late_proves_alive`` for some class.
    """

    newest_ms: int
    context: EvaluationContext
    frontier_ms: int
    settled_ms: int
    other_sites_frontier_ms: int
    least_frontier_ms: int
    held_back_ms: int
    retained_since_ms: int
    listed_since_ms: int
    origin: Origin | None
    has_all_lines: bool
    has_listed_devices: bool
    own_limits: bool
    was_rolled_back: bool
    lead_ms: int
    backlog_ms: int
    has_late_rules: bool

    def row(self) -> dict[str, Any]:
        """Return the values as a row for `one_row`."""
        return {
            "newest_received_ms": self.newest_ms,
            "frontier_ms": self.frontier_ms,
            "settled_ms": self.settled_ms,
            "other_sites_frontier_ms": self.other_sites_frontier_ms,
            "other_sites_settled_ms": self.other_sites_frontier_ms - self.held_back_ms,
            "least_frontier_ms": self.least_frontier_ms,
            "retained_since_ms": self.retained_since_ms,
            "listed_since_ms": self.listed_since_ms,
            "replayed_after_ms": self.origin.frontier_ms if self.origin else _BEFORE_ALL,
            "replayed_after_received_ms": self.origin.newest_ms if self.origin else _BEFORE_ALL,
            "has_all_lines": self.has_all_lines,
            "has_listed_devices": self.has_listed_devices,
            "was_rolled_back": self.was_rolled_back,
            "lead_ms_": self.lead_ms,
            "backlog_ms_": self.backlog_ms,
            "has_late_rules": self.has_late_rules,
        }

    def shards(self) -> pa.Table:
        """Return the sites that gap rows name, with frontier and settled instant."""
        shards = self.context.shards
        sites = [site for shard_sites in shards.sites for site in sorted(shard_sites)]
        instants = [shards.of(site).frontier_ms or _BEFORE_ALL for site in sites]
        settled = _instants(one - self.held_back_ms for one in instants)
        return pa.table(
            {"shard_site": pa.array(sites, pa.string()), "shard_frontier": _instants(instants), "shard_settled": settled}
        )


def roaming(tables: OpenedTables, shards: Shards) -> pa.Table:
    """Return the devices with messages from several shards.

    The tables do not show the order in which messages of different shards were judged.
    """
    if len(shards) == 1:
        return pa.table({"device_id": pa.array([], pa.string())})
    found = tables.arrow("SELECT DISTINCT device_id, site FROM messages")
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for one in _rows(found):
        numbers[one["device_id"]].add(shards.number(one["site"]))
    return pa.table(
        {"device_id": pa.array([one for one, device_shards in numbers.items() if len(device_shards) > 1], pa.string())}
    )


def job_position(home: Home) -> EvaluationPoint | None:
    """Return the position of the job; None if it has judged nothing yet."""
    judged = judged_up_to(home.checkpoint)
    if judged is None or span(home) is None:
        return None
    known = by_bronze(home, judged[1])
    if known.shards is None or known.frontier_ms is None:
        return None
    return position_from(home, judged[1], known.shards, known.policies, origin_of(home, judged[1]))


def position_from(home: Home, newest_ms: int, shards: Shards, policies: Policies, origin: Origin | None) -> EvaluationPoint:
    """Build the position that follows from coverage, frontier and policies."""
    deployment, kept_ms, listed_ms = home.deployment(), oldest_kept_ms(home, MESSAGES.name), oldest_kept_ms(home, _LISTED)
    frontiers_ms = [_BEFORE_ALL if one is None else one for one in shards.frontiers_ms]
    record = load_generations(home.lifecycle)
    return EvaluationPoint(
        newest_ms,
        EvaluationContext(shards, policies),
        max(frontiers_ms),
        deployment.emitted_through_ms(min(frontiers_ms)),
        frontiers_ms[0],
        min(frontiers_ms),
        deployment.verdict_jitter_ms,
        _BEFORE_ALL if kept_ms is None else kept_ms,
        _BEFORE_ALL if listed_ms is None else listed_ms + deployment.max_clock_lead_ms,
        origin,
        kept_ms is None and oldest_kept_ms(home, QUARANTINE.name) is None,
        any(one.made_from.get("devices") for one in ever_current(record)),
        any(one.made_from.get("own_limits") for one in ever_current(record)),
        any(_chosen_before(record, one.number) - record.with_chosen_devices(one.number) for one in ever_current(record)),
        deployment.max_clock_lead_ms,
        deployment.max_backlog_ms,
        any(dated.policy.has_late_rules for dated in policies.dated),
    )


def is_chosen(record: Generations, number: int) -> bool:
    """Return whether a generation may have other devices than the judgements table.

    It may if the generation itself, one of its sources, or an earlier generation was made of chosen
    devices.
    """
    return bool(record.with_chosen_devices(number) | _chosen_before(record, number))


def _chosen_before(record: Generations, number: int) -> frozenset[int]:
    before = (record.with_chosen_devices(one.number) for one in ever_current(record) if one.number < number)
    return frozenset[int]().union(*before)


def one_row(values: Mapping[str, Any]) -> pa.Table:
    """Return a table of one row.

    A value ``<name>_ms`` becomes the instant ``<name>``; ``<name>_ms_`` becomes the number
    ``<name>_ms``.
    """
    columns: dict[str, pa.Array] = {}
    for name, value in values.items():
        if name.endswith("_ms"):
            columns[name.removesuffix("_ms")] = _instants([value])
        else:
            columns[name.removesuffix("_")] = pa.array([value], pa.int64() if value is None else None)
    return pa.table(columns)


def _instants(values_ms: Iterable[int | None]) -> pa.Array:
    return pa.array([None if one is None else one * 1000 for one in values_ms], pa.int64()).cast(_INSTANT)


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield rows as dictionaries, in batches: dictionaries take nine times the memory of the table."""
    for batch in table.to_batches(max_chunksize=_AT_A_TIME):
        yield from batch.to_pylist()


def declared_columns(home: Home) -> pa.Table:
    """Return each declared column of the existing tables, with its stored type."""
    rows: list[dict[str, str | None]] = []
    for table in TABLES:
        stored = delta.stored_types(home, table)
        for column in table.columns if stored else ():
            found = {"table_name": table.name, "column_name": column.name, "declared": column.type}
            rows.append({**found, "stored": (stored or {}).get(column.name)})
    names = ("table_name", "column_name", "declared", "stored")
    return pa.table({name: pa.array([row[name] for row in rows], pa.string()) for name in names})


def deadlines(tables: OpenedTables, point: EvaluationPoint) -> pa.Table:
    """Return the transitions by silence, each with the deadline derived from bronze."""
    excused, own = _ends(tables), _own_timeouts(tables)
    found = tables.arrow(_SILENCES)
    due_ms: list[int | None] = []
    for one in _rows(found):
        at_ms, excuses_ms, entries = one["at_ms"], excused[one["device_id"]], own.get(one["device_id"])
        if at_ms is None or at_ms > (point.context.shards.of(one["site"]).frontier_ms or _BEFORE_ALL):
            due_ms.append(at_ms)  # judged after this position
            continue
        if entries is None and point.own_limits:  # a list may have given the device its own timeout
            due_ms.append(at_ms)
            continue
        before = [timeout_ms for since_ms, timeout_ms in entries or () if since_ms <= at_ms]
        timeout_ms = before[-1] if before else None
        base_ms = _silent(one, point.context, timeout_ms)
        later = base_ms is not None and at_ms is not None and at_ms > base_ms and at_ms in excuses_ms
        later_deadlines = (
            _silent(one, point.context, timeout_ms, since_ms)
            for since_ms in excuses_ms
            if at_ms is not None and since_ms <= at_ms
        )
        due_ms.append(at_ms if later or at_ms in later_deadlines else base_ms)
    names = ("device_id", "life", "transition_no", "event_time", "last_seen")
    return pa.table({**{name: found[name] for name in names}, "deadline": _instants(due_ms)})


def _silent(one: Mapping[str, Any], context: EvaluationContext, own_ms: int | None, from_ms: int = _BEFORE_ALL) -> int | None:
    """Return the instant at which a device had been silent for its timeout.

    This is the first such instant from `from_ms` on. The timeout is that of the device, or else of
    its class. Holds and class changes are not considered; the caller passes the instant at which
    one of them takes effect as `from_ms`.
    """
    quiet_ms = one["seen_ms"] if one["seen_ms"] is not None else max(one["life_ms"] or 0, one["registered_ms"] or 0)
    least_ms = max(quiet_ms, one["since_ms"] or quiet_ms, from_ms)
    coverage = context.shards.of(one["site"]).coverage
    covered_ms = coverage.covered(quiet_ms)
    for dated, since_ms, end_ms in context.policies.spans(least_ms):
        timeout_ms = dated.policy.of(one["device_class"]).timeout_ms if own_ms is None else own_ms
        due_ms = coverage.earliest(covered_ms + timeout_ms)
        if due_ms is not None and (end_ms is None or max(due_ms, since_ms, least_ms) < end_ms):
            return max(due_ms, since_ms, least_ms)
    return None


def _ends(tables: OpenedTables) -> Mapping[str, set[int]]:
    """Return the ends of holds and the instants of registry entries by device, epoch milliseconds."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for one in _rows(tables.arrow(_OWN)):
        until = json.loads(one["body"] or "{}").get("until")
        found[one["device_id"]].add(until if type(until) is int else one["at_ms"])
    return found


def _own_timeouts(tables: OpenedTables) -> Mapping[str, list[tuple[int, int | None]]]:
    """Return per device its registry entries in order: instant and own timeout."""
    found: defaultdict[str, list[tuple[int, int | None]]] = defaultdict(list)
    for one in _rows(tables.arrow(_ENTRIES)):
        content = json.loads(one["body"] or "{}")
        if content.get("op") == ADD and one["at_ms"] is not None:
            found[one["device_id"]].append((one["at_ms"], content.get("timeout_ms")))
    return found


@dataclass(frozen=True, slots=True)
class KeyGroupHeaders:
    """Header rows of the key groups of a state.

    Attributes:
        contexts: distinct headers, as JSON; a sound state has one.
        devices: number of devices in all key groups when the state was taken; None if a header
            lacks it.
    """

    contexts: tuple[str, ...]
    devices: int | None


def heads_of(tables: OpenedTables) -> KeyGroupHeaders:
    """Read the header rows of the key groups of a state.

    Raises:
        FleetError: the state has no header.
        ValueError: a header is damaged.
    """
    rows = tables.arrow(f"SELECT content FROM state WHERE part = '{GROUP}' AND content IS NOT NULL")["content"].to_pylist()
    if not rows:
        raise FleetError(f'its position is missing: it has no row of part "{GROUP}"', code="snapshot-position-missing")
    counts = [json.loads(one).get("devices") for one in rows]
    return KeyGroupHeaders(tuple(sorted({shared_context([one]) for one in rows})), None if None in counts else sum(counts))


def state_position(home: Home, context: str, about: SnapshotInfo) -> EvaluationPoint:
    """Return the position of a state.

    Args:
        home: the home.
        context: header of a key group, as JSON.
        about: metadata of the snapshot, or of the generation's state.
    """
    shards, policies = context_from_plain(json.loads(context))
    origin = origin_of(home, shards.newest_ms, about.generation, about.version)
    return position_from(home, shards.newest_ms, shards, policies, origin)


def pending(tables: OpenedTables) -> pa.Table:
    """Return the judgements that are pending in a state."""
    contents = tables.arrow("SELECT content FROM state WHERE part = 'pending' AND content IS NOT NULL")["content"].to_pylist()
    return delta.to_table(JUDGEMENTS, map(json.loads, contents))


def reserved_rows(tables: OpenedTables) -> pa.Table:
    """Return the pending rows of registry and operators, and those for all devices."""
    rows = tables.arrow(f"SELECT content FROM state WHERE part = '{OWN_ROW}'")["content"].to_pylist()
    found = [json.loads(one) for one in rows]
    columns = {name: pa.array([one[name] for one in found], pa.string()) for name in ("device_id", "kind")}
    return pa.table(columns | {name: _instants(one[f"{name}_ms"] for one in found) for name in ("received_at", "event_time")})


def by_bronze(home: Home, newest_ms: int) -> Outcome:
    """Derive coverage, frontier and policies from the rows of bronze up to an instant."""
    return outcome(rows_through(home, (), newest_ms), home.deployment())


def has_same_coverage(context: str, known: Outcome) -> bool:
    """Return whether a state has the frontier, gaps and policies that follow from bronze.

    Gaps and policies that the state has pruned are not compared.
    """
    shards, policies = context_from_plain(json.loads(context))
    expected = known.shards
    if expected is None or (expected.frontiers_ms, expected.sites) != (shards.frontiers_ms, shards.sites):
        return False
    dated = [one.pruned(shards.least_frontier_ms) for one in (known.policies, policies)]
    both = zip(expected.listenings, shards.listenings, strict=True)
    return dated[0] == dated[1] and all(_have_same_gaps(one.coverage, other.coverage) for one, other in both)


def _have_same_gaps(one: Coverage, other: Coverage) -> bool:
    since_ms = max(one.start_ms, other.start_ms)
    return _gaps_from(one, since_ms) == _gaps_from(other, since_ms)


def _gaps_from(coverage: Coverage, since_ms: int) -> Coverage:
    """Return coverage from an instant on, without the covered time before it."""
    remaining = coverage.forget_before(since_ms)
    late = remaining.until_ms is not None and remaining.gaps and remaining.until_ms > remaining.gaps[-1][0]
    return replace(remaining, base_ms=0, until_ms=remaining.until_ms if late else None)


def next_deadlines(tables: OpenedTables, point: EvaluationPoint, known: Outcome) -> pa.Table:
    """Return the next deadline of each device, its action, and expected covered time.

    The covered time is the one at the start of the device's silence.
    """
    rows: list[tuple[str, int | None, str | None, int | None]] = []
    for one in _devices(tables):
        due = next_due(one, point.context)
        at_ms, act = (None, None) if due is None else (due[0], due[1].value)
        rows.append((one.device_id, at_ms, act, _covered(one, point, known)))
    ids, instants, acts, covered_ms = zip(*rows, strict=True) if rows else ((), (), (), ())
    columns = {
        "deadline_id": pa.array(ids, pa.string()),
        "next_deadline": _instants(instants),
        "next_trigger": pa.array(acts, pa.string()),
    }
    return pa.table({**columns, "expected_covered_ms": pa.array(covered_ms, pa.int64())})


def _covered(device: Device, point: EvaluationPoint, known: Outcome) -> int | None:
    """Return the covered time at the start of a silence; None if bronze lacks it.

    State and bronze may count covered time from different instants. The covered time between the
    start of the silence and the frontier is the same in both: it is subtracted from the state's
    covered time at the frontier.
    """
    if known.shards is None:
        return None
    in_bronze, in_state = (shards.of(device.current_site) for shards in (known.shards, point.context.shards))
    if device.quiet_since_ms < max(point.retained_since_ms, in_bronze.coverage.start_ms):
        return None
    frontier_ms = in_state.frontier_ms or _BEFORE_ALL
    since_ms = in_bronze.coverage.covered(frontier_ms) - in_bronze.coverage.covered(device.quiet_since_ms)
    return in_state.coverage.covered(frontier_ms) - since_ms


def _devices(tables: OpenedTables) -> Iterator[Device]:
    """Yield the devices of a state that have a valid mode, with the fields that deadlines need."""
    for one in _rows(tables.arrow(_DUE)):
        if one["mode"] not in {*Mode} or any(one[name] is None for name in ("mode_since_ms", "class_since_ms", "life_ms")):
            continue
        mode = Mode(one.pop("mode"))
        held_ms = one.pop("held_until_ms")
        held = held_ms if mode in HELD else None
        yield Device(gateway=None, mode=mode, held_until_ms=held, **one)
