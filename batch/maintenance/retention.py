"""Retention of tables other than bronze: removal of old rows, and exceptions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from batch import amend
from batch.maintenance.plan import BUSY, Keep, Step, since, unless_disk_full
from fleetpulse.core.judgements import AMENDMENTS, JudgementKind
from fleetpulse.core.streams.tables import COMMANDS, SESSIONS, VITAL_ALARMS, VITALS
from fleetpulse.core.tables import (
    AUDIT,
    GATEWAYS,
    JUDGEMENTS,
    QUALITY_FAILURES,
    QUALITY_RESULTS,
    QUARANTINE,
    STREAM_HEALTH,
    literals,
)
from fleetpulse.core.times import DAY_MS, format_instant
from fleetpulse.io.checkpoints.generations import load_generations
from fleetpulse.io.delta.corruption import open_table
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms, raise_floor
from fleetpulse.io.maintenance import vacuum
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.row_accounting import removal_txn
from fleetpulse.reports.history.replay_origin import CAME_LATE, DONE, LAST_MS, LATE

_SUMMARIES: Final = f"kind = '{JudgementKind.SUMMARY.value}'"
_MOST_OPEN: Final = 1_000  # open sessions that a condition names
_OF_MESSAGES: Final = tuple(
    kind for kind in JudgementKind if kind not in (JudgementKind.TRANSITION, JudgementKind.SUMMARY, *AMENDMENTS)
)


@dataclass(frozen=True, slots=True)
class _Aged:
    """Rows of a table that are removed when they are old.

    Attributes:
        table: name of the table.
        column: column of the instant from which the age is counted.
        keep_ms: retention time, milliseconds; None keeps for ever.
        promised: name of the retention floor of these rows, see `retention_floor`.
        condition: SQL condition that selects the rows; empty for all.
        exceptions: function that returns an SQL condition for exceptions, given the home and the cutoff;
            empty for none.
    """

    table: str
    column: str
    keep_ms: int | None
    promised: str
    condition: str = ""
    exceptions: Callable[[Home, int], str] = lambda _home, _cutoff_ms: ""


def _aged(keep: Keep) -> tuple[_Aged, ...]:
    kinds = literals(_OF_MESSAGES)
    return (
        _Aged(QUARANTINE.name, "received_at", keep.quarantine_ms, QUARANTINE.name),
        _Aged(GATEWAYS.name, "received_at", keep.messages_ms, GATEWAYS.name, "", _newest_of_gateways),
        _Aged(STREAM_HEALTH.name, "began_at", keep.stream_health_ms, STREAM_HEALTH.name),
        _Aged(QUALITY_RESULTS.name, "began_at", keep.quality_ms, QUALITY_RESULTS.name),
        _Aged(QUALITY_FAILURES.name, "began_at", keep.quality_ms, QUALITY_FAILURES.name),
        _Aged(AUDIT.name, "recorded_at", keep.audit_ms, AUDIT.name),
        _Aged(SESSIONS.name, "last_seen", keep.sessions_ms, SESSIONS.name, "", _open_sessions),
        _Aged(VITALS.name, "window_end", keep.vitals_ms, VITALS.name),
        _Aged(COMMANDS.name, "sent_at", keep.commands_ms, COMMANDS.name),
        _Aged(COMMANDS.name, "answered_at", keep.commands_ms, "answers", "sent_at IS NULL"),
        _Aged(VITAL_ALARMS.name, "raised_at", keep.vitals_ms, VITAL_ALARMS.name),
        _Aged(JUDGEMENTS.name, "judged_at", keep.summaries_ms, "summaries", _SUMMARIES, _newest_summaries),
        _Aged(JUDGEMENTS.name, "judged_at", keep.late_ms, "late", f"kind IN ({kinds})", _not_amended),
    )


def remove_aged(home: Home, keep: Keep, existing: list[Path], now_ms: int, *, dry_run: bool) -> Iterator[Step]:
    """Remove old rows of the tables other than bronze."""
    for aged in _aged(keep):
        if aged.keep_ms is not None and home.table(aged.table) in existing:
            yield from unless_disk_full(aged.table, _remove(home, aged, aged.keep_ms, now_ms, dry_run=dry_run))


def _remove(home: Home, aged: _Aged, keep_ms: int, now_ms: int, *, dry_run: bool) -> Iterator[Step]:
    newest_ms = _newest_ms(home, aged)
    if newest_ms is None:
        return
    cutoff_ms = (min(newest_ms, now_ms) - keep_ms) // DAY_MS * DAY_MS
    old = " AND ".join(one for one in (f"{aged.column} < {vacuum.cutoff_text(cutoff_ms)}", aged.condition) if one)
    exceptions = aged.exceptions(home, cutoff_ms) if _count(home, aged.table, old) else ""
    expired = f"{old} AND NOT ({exceptions})" if exceptions else old
    expired_rows = _count(home, aged.table, expired)
    if aged.exceptions is _not_amended and (left := _count(home, aged.table, old) - expired_rows):
        yield Step(aged.table, "hold", rows=left, note="late messages not amended yet stay; run ./fleet amend")
    if not expired_rows:
        return
    note = f"{aged.column} before {format_instant(cutoff_ms)}" + (f", {aged.promised}" if aged.condition else "")
    note = since(note, newest_ms, now_ms)
    if not dry_run:
        if aged.exceptions is _not_amended:
            _promise_late(home, expired)
        raise_floor(home, aged.promised, cutoff_ms)
        table = home.table(aged.table)
        counted = removal_txn(open_table(table), expired_rows) if aged.table == QUARANTINE.name else None
        if vacuum.remove_rows(table, expired, counted) is None:
            expired_rows, note = 0, BUSY
    yield Step(aged.table, "remove", rows=expired_rows, note=note)


def _newest_ms(home: Home, aged: _Aged) -> int | None:
    condition = f"WHERE {aged.condition}" if aged.condition else ""
    sql = f"SELECT epoch_ms(max({aged.column})) AS newest FROM {aged.table} {condition}"
    return tables.query(home, sql, tables=[aged.table])[0]["newest"]


def _count(home: Home, table: str, condition: str) -> int:
    return int(tables.query(home, f"SELECT count(*) AS n FROM {table} WHERE {condition}", tables=[table])[0]["n"])


def _not_amended(home: Home, _: int) -> str:
    """Return the condition for old judgements to keep: those not amended yet.

    Empty if amend has never run.
    """
    reached_ms = tables.landed(home, JUDGEMENTS, DONE)
    last = "coalesce(received_until, received_at)"
    return f"{amend.AMENDABLE} AND {last} > {vacuum.cutoff_text(reached_ms)}" if reached_ms else ""


def _promise_late(home: Home, expired: str) -> None:
    """Raise the retention floor of late messages, if any are removed.

    This floor is separate: the removal of other judgements about messages does not raise it.
    """
    if oldest_kept_ms(home, CAME_LATE) is None:
        raise_floor(home, CAME_LATE, oldest_kept_ms(home, "late") or 0)
    sql = f"SELECT max({LAST_MS}) AS newest FROM judgements WHERE {expired} AND {LATE}"
    if (newest_ms := tables.query(home, sql)[0]["newest"]) is not None:
        raise_floor(home, CAME_LATE, newest_ms + 1)


def _newest_of_gateways(home: Home, cutoff_ms: int) -> str:
    """Return the condition for old records of gateways to keep: the newest old one of each.

    Landing restores a gateway from its newest record that landed. A record whose messages have not
    landed is never old, since ages count back from the newest message. If two bridges have the same
    place, one record more is kept.
    """
    sql = f"""SELECT place FROM {GATEWAYS.name} WHERE received_at < {vacuum.cutoff_text(cutoff_ms)}
        QUALIFY 1 = row_number() OVER (PARTITION BY device_id ORDER BY received_at DESC, place DESC) ORDER BY place"""
    places = [str(one["place"]) for one in tables.query(home, sql, tables=[GATEWAYS.name])]
    return f"place IN ({', '.join(places)})" if places else ""


def _open_sessions(home: Home, cutoff_ms: int) -> str:
    """Return the condition for old rows of sessions to keep: the starts of sessions without an end.

    If there are many, all old starts are kept.
    """
    ends = f"SELECT device_id, started_at, position FROM {SESSIONS.name} WHERE ended_at IS NOT NULL"
    sql = f"""SELECT epoch_ms(started_at) AS started_ms, position, device_id FROM {SESSIONS.name}
        ANTI JOIN ({ends}) AS ended USING (device_id, started_at, position)
        WHERE ended_at IS NULL AND last_seen < {vacuum.cutoff_text(cutoff_ms)} ORDER BY ALL LIMIT {_MOST_OPEN + 1}"""
    found = tables.query(home, sql, tables=[SESSIONS.name])
    if len(found) > _MOST_OPEN:
        return "ended_at IS NULL"
    starts = (f"(started_at = {vacuum.cutoff_text(one['started_ms'])} AND position = {one['position']})" for one in found)
    return f"ended_at IS NULL AND ({' OR '.join(sorted({*starts}))})" if found else ""


def _newest_summaries(home: Home, cutoff_ms: int) -> str:
    """Return the condition for old summaries to keep: the newest of each key group.

    Reports take their counts from these summaries. They are of the current generation, or of one of
    which it is a copy: a copy continues the counts. If none of these has emitted a summary, they are
    of the newest generation that has. Summaries of other generations may be removed: their key
    groups emit no more.
    """
    record, current = load_generations(home.lifecycle), home.generation().number
    emitting = tables.query(home, f"SELECT DISTINCT generation FROM judgements WHERE {_SUMMARIES} ORDER BY 1 DESC NULLS LAST")
    newest: list[int | None] = [one["generation"] for one in emitting]
    copied = record.repartitioned_from(current)
    if not {*copied} & {*newest}:
        copied = [] if newest[0] is None else record.repartitioned_from(newest[0])
    of_generations = "generation IS NULL" if not copied else f"generation IN ({', '.join(map(str, copied))})"
    found = tables.query(
        home,
        f"""SELECT key_group, epoch_ms(judged_at) AS newest_ms, generation FROM judgements WHERE {_SUMMARIES} AND {of_generations}
            QUALIFY 1 = row_number() OVER (PARTITION BY key_group ORDER BY generation DESC, judged_at DESC)
                AND newest_ms < ? ORDER BY key_group""",
        [cutoff_ms],
    )
    conditions: list[str] = []
    for one in found:
        generation = "IS NULL" if one["generation"] is None else f"= {one['generation']}"
        since = vacuum.cutoff_text(one["newest_ms"])
        conditions.append(f"(key_group = {one['key_group']} AND generation {generation} AND judged_at >= {since})")
    return " OR ".join(conditions)
