"""Verdicts that a jitter holds back: have them written by the running job before its state is copied, or it or a bridge stops."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from cli.common.output import say
from cli.supervisor.processes import Run
from cli.supervisor.progress import judged_through, judged_to_the_end
from fleetpulse.core.rows import BRIDGE, EVERYONE, FLUSH, Kind
from fleetpulse.io.home.command_spool import spool, spooled
from fleetpulse.io.home.desired_state import RUNNING, get_desired
from fleetpulse.io.home.home import Home, bridge_job
from fleetpulse.io.home.services import runs
from fleetpulse.io.ingest.segments import BridgeOffset, position
from fleetpulse.io.system.process import read_status

PATIENCE_S: Final = 30.0
_TOPIC: Final = f"fleet/{EVERYONE}/{BRIDGE}/{Kind.TICK.value}"


def say_held_back(home: Home) -> bool:
    """Have all verdicts written that are due at the newest row; say so, or why they stay held back.

    The bridge writes a tick that flushes; what is waited for is that it has been judged.

    Returns:
        Whether nothing is held back any more, as of a row that was received after this was called.
    """
    if not home.deployment().verdict_jitter_ms:
        return True
    if why := _out_of_reach(home):
        say(f"verdicts that the jitter holds back stay held back: {why}")
        return False
    say("asking for the verdicts that the jitter holds back")
    spool(home, [(_TOPIC, {"op": FLUSH})])
    limit = time.monotonic() + PATIENCE_S
    stand: BridgeOffset | None = None  # of the bridge, when it had written what it was asked for
    while stand is None or not judged_through(home, {BRIDGE: stand}):
        if (why := _out_of_reach(home)) or time.monotonic() > limit:
            say(f"verdicts that the jitter holds back are not all written: {why or f'not within {PATIENCE_S:.0f} s'}")
            return False
        time.sleep(0.1)
        if stand is None and _TOPIC not in spooled(home, taken=True):
            stand = position(home.segments_of(BRIDGE))
    return True


def stop_listening(run: Run, verbs: Sequence[str], judging: Callable[[], bool], patience_s: float) -> None:
    """Stop what takes messages in, and wait until what a jitter holds back is written: a bridge asks for that as it stops.

    Args:
        run: the run.
        verbs: of the jobs that are stopped, in this order; the bridge is one of them.
        judging: whether there still is somebody to judge.
        patience_s: for how long at most that is waited for.
    """
    for verb in verbs:
        run.stop(verb)
    if not run.home.deployment().verdict_jitter_ms:
        return
    limit = time.monotonic() + patience_s
    while judging() and not judged_to_the_end(run.home):
        if time.monotonic() > limit:
            say(f"some verdicts are still held back after {patience_s:.0f} s; the next run writes them")
            return
        time.sleep(0.1)


def _out_of_reach(home: Home) -> str:
    """Return why the job does not come to judge what is asked for now; nothing where it does."""
    for job in (BRIDGE, "landing", "lifecycle"):
        if not runs(home, job):
            return f"no {job.partition('-')[0]} runs"
    if get_desired(home).what != RUNNING:
        return "the lifecycle job is stopped"
    if read_status(home.run(bridge_job(BRIDGE))).get("state") != "live":
        return "the bridge plays a history"
    return ""
