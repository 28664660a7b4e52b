"""Lateness of signals and the order in which rows are judged, over columns.

Rule: the results equal those of `core.replay.LatenessFilter` and `core.replay.judging_order`, which are
the definition. The laws in ``tests/property`` compare them.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.codec.arrow import KINDS, SIGNAL_SCHEMA
from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.fold.judgement_batches import rejections
from fleetpulse.columnar.jit.cache import jit_cached, jit_no_refcount
from fleetpulse.columnar.jit.context import Int64s, PackedContext, covered, greatest
from fleetpulse.columnar.jit.layout import TRUSTS
from fleetpulse.columnar.jit.take import filtered
from fleetpulse.core.judgements import JudgementKind, clock_behind
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import MAX_POSITION, POSITION_BITS, Kind, Trust

_MANY_ROWS: Final = 64  # rows of one device up to which insertion sort is used, else merge sort
_ON_TIME, _LATE, _INVALID, _AHEAD, _BEHIND = (
    TRUSTS.index(one) for one in (Trust.ON_TIME, Trust.LATE, Trust.INVALID, Trust.AHEAD, Trust.BEHIND)
)
_DEATH: Final = KINDS.index(Kind.DEATH)


def frontiers(context: PackedContext, received_ms: Int64s, lateness_ms: int, newest_ms: int, frontier_ms: int) -> Int64s:
    """Return the frontier at each row, as `ShardProgress.read`; `NONE` before the first.

    Args:
        context: coverage, constant over all rows.
        received_ms: ``received_at`` of each row.
        lateness_ms: allowed lateness.
        newest_ms: newest ``received_at`` before the rows.
        frontier_ms: frontier before the rows, or `NONE`.
    """
    found = np.empty(len(received_ms), np.int64)
    _reach(context, received_ms, lateness_ms, newest_ms, frontier_ms, found)
    return found


@jit_no_refcount
def _reach(
    context: PackedContext, received_ms: Int64s, lateness_ms: int, newest_ms: int, frontier_ms: int, found: Int64s
) -> None:
    for row in range(len(received_ms)):
        reach = greatest(context, covered(context, max(newest_ms, received_ms[row])) - lateness_ms)
        found[row] = max(frontier_ms, reach)


def shards_of(signals: pa.RecordBatch, shards: Shards) -> Int64s:
    """Return the shard number of each signal's site."""
    if len(shards) == 1:
        return np.zeros(signals.num_rows, np.int64)
    sites = signals["site"]
    numbers = np.array([*map(shards.number, sites.dictionary.to_pylist()), 0], np.int64)
    return numbers[sites.indices.fill_null(len(numbers) - 1).to_numpy()]


def by_shard(signals: pa.RecordBatch, shards: Shards) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield shard number and signals of each shard with signals, in their order."""
    if len(shards) == 1:
        yield 0, signals
        return
    numbers = shards_of(signals, shards)
    for number in np.unique(numbers).tolist():
        yield number, filtered(signals, numbers == number)


class LateSplit(NamedTuple):
    """Result of `split_late`.

    Attributes:
        kept: all signals and wills, with their presence times.
        judgements: judgements that list the late signals, columns of `JUDGEMENT_SCHEMA`.
    """

    kept: pa.RecordBatch
    judgements: list[pa.RecordBatch]


def split_late(signals: pa.RecordBatch, frontier_ms: Int64s, deployment: Deployment) -> LateSplit:
    """Set the presence time of signals and list the late ones.

    The rules are those of `core.presence.presence_time`.

    Args:
        signals: columns of `SIGNAL_SCHEMA`, before this step.
        frontier_ms: frontier at each signal, see `frontiers`.
        deployment: clock lead and backlog.
    """
    event_ms, received_ms = signals["presence_ms"].to_numpy(), signals["received_at_ms"].to_numpy()
    lead_ms = event_ms - received_ms
    late = event_ms <= frontier_ms
    trust = signals["trust"].to_numpy()
    right = lead_ms.max(initial=0) <= 0 and -lead_ms.min(initial=0) <= deployment.max_backlog_ms
    if right and not late.any() and not trust.any():
        return LateSplit(signals, [])
    trust = trust.copy()
    own = signals["device_clock"].to_numpy(zero_copy_only=False) & (trust != _INVALID)
    trust[own & (lead_ms > deployment.max_clock_lead_ms)] = _AHEAD
    trust[own & (-lead_ms > deployment.max_backlog_ms)] = _BEHIND
    late &= trust == _ON_TIME
    trust[late] = _LATE
    judgements: list[pa.RecordBatch] = []
    if late.any():
        why = [clock_behind(lead) for lead in lead_ms[late].tolist()]
        judgements.append(rejections(signals.filter(pa.array(late)), JudgementKind.LATE, why, (frontier_ms - event_ms)[late]))
    presence_ms = np.where(trust == _ON_TIME, np.minimum(event_ms, received_ms), received_ms)
    found = {"presence_ms": presence_ms, "offset_ms": event_ms - presence_ms, "trust": trust}
    for name, values in found.items():
        signals = signals.set_column(SIGNAL_SCHEMA.get_field_index(name), SIGNAL_SCHEMA.field(name), pa.array(values))
    return LateSplit(signals, judgements)


def in_order(signals: pa.RecordBatch, places: Int64s) -> tuple[Int64s, Int64s]:
    """Order due rows for judging and find the copies among them, as `core.replay.judging_order`.

    Args:
        signals: columns of `SIGNAL_SCHEMA`: all due rows of their devices.
        places: index of each row's device; rows with -1 are skipped.

    Returns:
        Indices of the rows to judge, in judging order; and indices of the copies of rows received
        earlier.
    """
    order, tied = _by_device(places, signals["presence_ms"].to_numpy(), int(places.max(initial=-1)) + 1)
    rows = order[tied]
    if not len(rows):
        return order, rows
    ranked, copies = _untie(signals.take(pa.array(rows)), places[rows])
    order[tied] = rows[ranked]  # rows of one device and instant are adjacent, and remain so
    copied = np.zeros(len(places), bool)
    copied[rows[copies]] = True
    return order[~copied[order]], rows[copies]


@jit_cached
def _by_device(places: Int64s, event_ms: Int64s, count: int) -> tuple[Int64s, NDArray[np.bool_]]:
    """Order rows by device and presence time, and mark the ties.

    A tie is a row that shares both with a neighbour. A counting sort by device comes first. The few
    rows of each device, mostly in order, are then sorted.
    """
    ends = np.zeros(count + 1, np.int64)
    for row in range(len(places)):
        if places[row] >= 0:
            ends[places[row] + 1] += 1
    for place in range(count):
        ends[place + 1] += ends[place]
    order = np.empty(ends[count], np.int64)
    filled = ends[:-1].copy()
    for row in range(len(places)):
        if places[row] >= 0:
            order[filled[places[row]]] = row
            filled[places[row]] += 1
    tied = np.zeros(len(order), np.bool_)
    for place in range(count):
        start, end = ends[place], ends[place + 1]
        if end - start > _MANY_ROWS:
            order[start:end] = order[start:end][np.argsort(event_ms[order[start:end]], kind="mergesort")]
        else:
            for at in range(start + 1, end):
                row, back = order[at], at
                while back > start and event_ms[order[back - 1]] > event_ms[row]:
                    order[back] = order[back - 1]
                    back -= 1
                order[back] = row
        for at in range(start + 1, end):
            if event_ms[order[at]] == event_ms[order[at - 1]]:
                tied[at] = tied[at - 1] = True
    return order, tied


def _untie(signals: pa.RecordBatch, places: Int64s) -> tuple[Int64s, Int64s]:
    """Order rows that share device and instant, and find the copies among them.

    Returns:
        Indices of all rows in judging order, and indices of the copies.
    """
    digest, seq, kind, offset, trust = (signals[name].to_numpy() for name in ("digest", "seq", "kind", "offset_ms", "trust"))
    boot, arrival = _rank(signals["boot"]), arrivals(signals)
    judged = (boot, digest, kind, seq, kind == _DEATH, signals["presence_ms"].to_numpy(), places)
    identity = (offset, trust == _INVALID, *judged)
    first = np.lexsort((_rank(signals["gateway"]), _rank(signals["site"]), _rank(signals["code"]), arrival, *identity))
    copy = np.zeros(len(first), bool)
    copy[1:] = np.logical_and.reduce([key[first[1:]] == key[first[:-1]] for key in identity])
    return np.lexsort((arrival, *judged)), first[copy]


def arrivals(signals: pa.RecordBatch) -> Int64s:
    """Return the position of each row in arrival order, as `Row.arrival`."""
    position = np.minimum(signals["position"].to_numpy(), MAX_POSITION)
    return (signals["received_at_ms"].to_numpy() << POSITION_BITS) + position


def _rank(texts: pa.StringArray | pa.DictionaryArray) -> Int64s:
    """Return a rank for each word, in the order of the words; null has the lowest rank."""
    plain = texts.dictionary_decode() if pa.types.is_dictionary(texts.type) else texts
    return pc.rank(plain, [("", "ascending", "at_start")], tiebreaker="dense").to_numpy()
