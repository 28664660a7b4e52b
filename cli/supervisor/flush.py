"""Flush of the verdicts that ``verdict_jitter`` delays.

The running lifecycle job must emit them before its state is copied, and before it or a bridge stops.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

from cli.common.output import report_progress
from cli.supervisor.processes import Run
from cli.supervisor.progress import judged_through, judged_to_the_end
from fleetpulse.core.rows import BRIDGE, EVERYONE, FLUSH, Kind
from fleetpulse.io.home.command_spool import spool, spooled
from fleetpulse.io.home.desired_state import RUNNING, get_desired
from fleetpulse.io.home.home import Home, bridge_job
from fleetpulse.io.home.services import runs
from fleetpulse.io.ingest.segments import BridgePosition, bridge_position
from fleetpulse.io.system.process import read_status

PATIENCE_S: Final = 30.0
_TOPIC: Final = f"fleet/{EVERYONE}/{BRIDGE}/{Kind.TICK.value}"


def flush_delayed_verdicts(home: Home) -> bool:
    """Flush delayed verdicts, and wait until the running job has emitted them.

    The bridge writes a tick that requests the flush. This function waits until that tick is judged,
    and reports progress and failure to the user.

    Returns:
        Whether all verdicts that were due at the time of the call have been emitted.
    """
    if not home.deployment().verdict_jitter_ms:
        return True
    if why := _reason_not_judging(home):
        report_progress(f"delayed verdicts were not flushed: {why}")
        return False
    report_progress("flushing the verdicts that verdict_jitter delays")
    spool(home, [(_TOPIC, {"op": FLUSH})])
    limit = time.monotonic() + PATIENCE_S
    position: BridgePosition | None = None  # position of the bridge, once the bridge has written the tick
    while position is None or not judged_through(home, {BRIDGE: position}):
        if (why := _reason_not_judging(home)) or time.monotonic() > limit:
            report_progress(f"some delayed verdicts were not flushed: {why or f'not within {PATIENCE_S:.0f} s'}")
            return False
        time.sleep(0.1)
        if position is None and _TOPIC not in spooled(home, include_taken=True):
            position = bridge_position(home.segments_of(BRIDGE))
    return True


def stop_listening(run: Run, verbs: Sequence[str], judging: Callable[[], bool], patience_s: float) -> None:
    """Stop the jobs that receive messages, and wait for delayed verdicts.

    A bridge requests the flush as it stops.

    Args:
        run: the run.
        verbs: verbs of the jobs to stop, in this order; the bridge is one of them.
        judging: function that returns whether the jobs that judge still run.
        patience_s: longest wait for the verdicts, in seconds.
    """
    for verb in verbs:
        run.stop(verb)
    if not run.home.deployment().verdict_jitter_ms:
        return
    limit = time.monotonic() + patience_s
    while judging() and not judged_to_the_end(run.home):
        if time.monotonic() > limit:
            report_progress(f"some delayed verdicts were not flushed within {patience_s:.0f} s; the next run emits them")
            return
        time.sleep(0.1)


def _reason_not_judging(home: Home) -> str:
    """Return why the lifecycle job cannot judge a flush now; empty if it can."""
    for job in (BRIDGE, "landing", "lifecycle"):
        if not runs(home, job):
            return f"the {job.partition('-')[0]} does not run"
    if get_desired(home).state != RUNNING:
        return "the lifecycle job is stopped"
    if read_status(home.run(bridge_job(BRIDGE))).get("state") != "live":
        return "the bridge is replaying a recording"
    return ""
