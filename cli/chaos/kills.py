"""The kills: who is killed, when, who starts it again, and when it has recovered.

Rule 1: bridge, landing and lifecycle job are started again by `Job.watch`, as ``fleet up`` does it, looked at as often.
Rule 2: ``fleet up`` ends where its broker dies, and asks for the same command again; here the broker alone is started again, on
its own port, as a service manager does it with a broker of one's own.
Rule 3: a process is not killed a second time before it has recovered, or a slow machine would never get anywhere; others are.
"""

import os
import signal
import time
from dataclasses import dataclass
from random import Random
from typing import Final

import psutil

from cli.chaos.targets import Victim
from cli.supervisor.processes import Job, Run
from cli.supervisor.up import WATCH_S
from fleetpulse.core.errors import FleetError
from fleetpulse.core.rows import BRIDGE, Origin
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.ingest.segments import list_segments, read_segment
from fleetpulse.io.system.process import Stop
from fleetpulse.io.system.wall_clock import wall_clock_ms
from streaming.landing.landing import places_of
from streaming.landing.merge import place

RECOVERY_S: Final = 600.0  # the longest that is waited for one
_LOOK_S: Final = 0.1


_OF_BROKER: Final = (Victim.BROKER, Victim.OUTAGE)


@dataclass(slots=True)
class Kill:
    """One kill.

    Attributes:
        victim: of which kind.
        at_ms: when, epoch milliseconds.
        of: the process that is started again.
        began_s: when, on the monotonic clock.
        mark: how far its work had come when it was started again; None until then.
        due: the segment with the first row of a device since; None until there is one.
        recovered_s: how long until a row was landed again, or judged for the lifecycle job; None until then.
    """

    victim: Victim
    at_ms: int
    of: int
    began_s: float
    mark: int | None = None
    due: int | None = None
    recovered_s: float | None = None


class Killing:
    """Kills, and tends what was killed until it has recovered.

    Args:
        run: the running processes.
        random: which process of the lifecycle job.
        stop: whether to end; then `KeyboardInterrupt` is raised.
        outage_s: how long a broker is away in an outage.
    """

    def __init__(self, run: Run, random: Random, stop: Stop, outage_s: float) -> None:
        self.kills: list[Kill] = []
        self._run = run
        self._random = random
        self._stop = stop
        self._outage_s = outage_s
        self._broker_is_away = False
        self._watch_at_s = 0.0

    def tend(self, seconds: float) -> None:
        """Let time go by, starting again what died, as ``fleet up`` would, and noting what recovered.

        Raises:
            FleetError: something ended too often, or has not recovered in time.
            KeyboardInterrupt: it is to stop.
        """
        end_s = time.monotonic() + seconds
        while True:
            if time.monotonic() >= self._watch_at_s:
                self._watch_at_s = time.monotonic() + WATCH_S
                self._watch()
            self._note()
            rest_s = end_s - time.monotonic()
            if rest_s <= 0:
                return
            self.rest(min(_LOOK_S, rest_s))

    def rest(self, seconds: float) -> None:
        """Let time go by.

        Raises:
            KeyboardInterrupt: it is to stop.
        """
        if self._stop.wait(seconds):
            raise KeyboardInterrupt

    def await_recovery(self, victim: Victim | None = None) -> None:
        """Wait until the process of a victim has recovered from its kills; None waits for all."""
        same = _OF_BROKER if victim in _OF_BROKER else (victim,)
        while any(kill.recovered_s is None and (victim is None or kill.victim in same) for kill in self.kills):
            self.tend(_LOOK_S)

    def kill(self, victim: Victim) -> None:
        """Kill, with -9."""
        self.await_recovery(victim)
        of = self._broker_pid() if victim in _OF_BROKER else self._alive(self._job(victim))
        killed = self._random.choice([of, *_jvm(of)]) if victim is Victim.LIFECYCLE else of
        kill = Kill(victim, wall_clock_ms(), of, time.monotonic())
        os.kill(killed, signal.SIGKILL)
        self.kills.append(kill)
        if victim in _OF_BROKER:
            self._start_broker_after(self._outage_s if victim is Victim.OUTAGE else 0.0)
            kill.mark = self._written()

    def _start_broker_after(self, seconds: float) -> None:
        broker = self._run.broker
        assert broker is not None, "chaos has a broker of its own"
        self._broker_is_away = True
        if seconds:
            self.tend(seconds)
        broker.stop()
        broker.start()
        self._broker_is_away = False

    def _watch(self) -> None:
        if self._broker_is_away:
            for job in self._run.jobs:
                job.watch()
        else:
            self._run.watch()

    def _broker_pid(self) -> int:
        assert self._run.broker is not None and self._run.broker.pid is not None, "it was seen running"
        return self._run.broker.pid

    def _job(self, victim: Victim) -> Job:
        return next(job for job in self._run.jobs if job.name == victim.value)

    def _alive(self, job: Job) -> int:
        """Return a job's process, when it runs."""
        while not job.alive():
            self.tend(_LOOK_S)
        assert job.pid is not None, "it is alive"
        return job.pid

    # ---- recovery

    def _note(self) -> None:
        for kill in self.kills:
            if kill.recovered_s is not None:
                continue
            took_s = time.monotonic() - kill.began_s
            if kill.mark is None:
                self._mark(kill)
            elif self._has_recovered(kill, kill.mark):
                kill.recovered_s = took_s
            if took_s > RECOVERY_S + self._outage_s:
                raise FleetError(
                    f"the {kill.victim} was killed {took_s:.0f} s ago and has not come back to work; see the logs in "
                    f'"{self._run.home.logs}"',
                    code="job-not-back",
                )

    def _mark(self, kill: Kill) -> None:
        if kill.victim in _OF_BROKER or not self._job(kill.victim).alive() or self._job(kill.victim).pid == kill.of:
            return
        if kill.victim is Victim.LIFECYCLE:
            kill.mark = self._judged()
        else:
            kill.mark = self._landed() if kill.victim is Victim.LANDING else self._written()

    def _has_recovered(self, kill: Kill, mark: int) -> bool:
        """Whether a row was judged or landed that had not been when it was started again; a row of a device, not one of ours."""
        if kill.victim is Victim.LIFECYCLE:
            return self._judged() > mark
        if kill.victim is Victim.LANDING:
            return self._landed() > mark
        kill.due = kill.due or self._with_device_after(mark)
        return kill.due is not None and self._landed() > place(kill.due, 0)

    def _judged(self) -> int:
        reached = judged_up_to(self._run.home.checkpoint)
        return reached[0] if reached else -1

    def _landed(self) -> int:
        """Return up to which row landing has come, see `merge.place`."""
        return places_of(self._run.home, MESSAGES)[BRIDGE]

    def _written(self) -> int:
        return max((number for number, _ in list_segments(self._run.home.segments)), default=0)

    def _with_device_after(self, mark: int) -> int | None:
        """Return the number of the first segment after another that holds a device's row, of those that are there."""
        for number, path in list_segments(self._run.home.segments):
            try:
                if number > mark and Origin.MQTT.value in read_segment(path)["origin"].to_pylist():
                    return number
            except FileNotFoundError:
                continue  # landed meanwhile
        return None


def _jvm(pid: int) -> list[int]:
    try:
        return [one.pid for one in psutil.Process(pid).children(recursive=True) if one.name() == "java"][:1]
    except psutil.Error:
        return []
