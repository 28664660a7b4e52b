"""What numba compiles, compiled before it is needed: seconds once after an installation or a change of source, then nothing."""

from fleetpulse.columnar.blocks import NO_SIGNALS, signals_to_batch
from fleetpulse.columnar.compiled import remove_outdated
from fleetpulse.columnar.fingerprints import fingerprint
from fleetpulse.columnar.group import KeyGroup, begin
from fleetpulse.columnar.kernel import judge_rows
from fleetpulse.columnar.snapshots import taken
from fleetpulse.core.decoding import decode
from fleetpulse.core.messages import Origin, Row
from fleetpulse.core.replay import Deployment

_LATENESS_MS = 1_000


def warm() -> None:
    """Fold an error, let time pass, take what there is: that calls whatever is compiled; it is kept in place of what was."""
    row = decode("fleet/site/device/error", b'{"code": "E1"}', 0, Origin.MQTT)
    assert isinstance(row, Row), "an error needs no more than a code"
    deployment = Deployment(_LATENESS_MS, verdict_jitter_ms=1)
    group = begin(row.received_at_ms)
    for signals in (signals_to_batch([row]), NO_SIGNALS):
        step = group.fold(signals, [], group.listening.newest_ms + 2 * _LATENESS_MS, deployment, lambda _: b"")
        assert not step.chunks, "what has just come is due"
        group = KeyGroup.from_bytes(group.to_bytes())
    for rows in taken(0, group.to_bytes(), {}, group.listening.newest_ms, deployment):
        fingerprint(rows)
    remove_outdated(judge_rows)
