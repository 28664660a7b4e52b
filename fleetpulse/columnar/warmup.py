"""Compilation of all numba functions ahead of use.

It takes seconds once, after an installation or a change of sources; later calls load the cache.
"""

from dataclasses import replace

from fleetpulse.columnar.codec.arrow import NO_SIGNALS, signals_to_batch
from fleetpulse.columnar.codec.wire import to_wires
from fleetpulse.columnar.fold.key_group import KeyGroup, begin
from fleetpulse.columnar.jit.cache import remove_outdated
from fleetpulse.columnar.jit.kernel import apply_rows
from fleetpulse.columnar.jit.take import partition_by_hash
from fleetpulse.columnar.snapshot.checksum import fingerprint
from fleetpulse.columnar.snapshot.rows import snapshot_rows
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Kind, Origin, Row

_LATENESS_MS = 1_000
_BITS = (8, 16, 32, 64)  # widths of a narrow column


def warm() -> None:
    """Call every compiled function once, and remove outdated caches.

    It encodes and folds an error, advances time, and takes and fingerprints a snapshot.
    """
    row = decode("fleet/site/device/error", b'{"code": "E1"}', 0, Origin.MQTT)
    assert isinstance(row, Row), "a code suffices for an error"
    order, ends = partition_by_hash(signals_to_batch([row, row])["received_at_ms"].to_numpy(), 1)
    for bits in _BITS:
        early, late = (
            replace(row, event_time_ms=at_ms, kind=kind) for at_ms, kind in ((0, Kind.HEARTBEAT), (2 ** (bits - 2), Kind.ERROR))
        )
        to_wires(signals_to_batch([early, late, row]), order, ends.tolist())  # two of three rows, so that rows are selected
    deployment = Deployment(_LATENESS_MS, verdict_jitter_ms=1)
    group = begin(row.received_at_ms)
    for signals in (signals_to_batch([row]), NO_SIGNALS):
        step = group.fold(signals, [], group.shards.newest_ms + 2 * _LATENESS_MS, deployment, lambda _: b"")
        assert not step.chunks, "the new row is due at once"
        group = KeyGroup.from_bytes(group.to_bytes())
    for rows in snapshot_rows(0, group.to_bytes(), {}, group.shards.newest_ms, deployment):
        fingerprint(rows)
    remove_outdated(apply_rows)
