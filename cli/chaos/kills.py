"""Kills of processes, their restarts, and the detection of their recovery.

Rule 1: `Job.watch` restarts bridge, landing and lifecycle job, at the interval of ``fleet up``.
Rule 2: ``fleet up`` ends if its broker dies. Here only the broker is restarted, on the same port,
as a service manager restarts an external broker.
Rule 3: with a cluster, an executor, a worker or the lifecycle job (the driver) is killed between the
start and the commit of a batch. A worker is restarted as by a service manager.
Rule 4: a process is killed again only after it has recovered; otherwise, a slow machine would make
no progress. Other processes may be killed meanwhile.
"""

import os
import signal
import time
from dataclasses import dataclass
from random import Random
from typing import Final

import psutil

from cli.chaos.targets import OF_CLUSTER, KillKind
from cli.supervisor.processes import Job, Run
from cli.supervisor.up import WATCH_S
from fleetpulse.core.errors import FleetError
from fleetpulse.core.rows import BRIDGE, Origin
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import judged_up_to, unfinished
from fleetpulse.io.ingest.segments import list_segments, read_segment
from fleetpulse.io.spark.standalone import StandaloneCluster
from fleetpulse.io.system.process import StopSignal
from fleetpulse.io.system.wall_clock import wall_clock_ms
from streaming.landing.landing import landed_places
from streaming.landing.merge import place

RECOVERY_S: Final = 600.0  # longest wait for one recovery
_POLL_S: Final = 0.1
_BATCH_POLL_S: Final = 0.01  # a batch takes most of a second or longer

_OF_BROKER: Final = (KillKind.BROKER, KillKind.OUTAGE)


@dataclass(slots=True)
class Kill:
    """One kill.

    Attributes:
        victim: kind of the kill.
        at_ms: instant of the kill, epoch milliseconds.
        of: id of the process that must be restarted.
        began_s: instant of the kill on the monotonic clock.
        mark: position of its work at the restart, or at the kill of a part of the cluster; None until
            then.
        due: number of the first segment after the mark with a row of a device; None until there is
            one.
        recovered_s: seconds from the kill until the next row was landed, or until it was judged if the
            victim is the lifecycle job or a part of its cluster; None until then.
    """

    victim: KillKind
    at_ms: int
    of: int
    began_s: float
    mark: int | None = None
    due: int | None = None
    recovered_s: float | None = None


class KillExecutor:
    """Executor of kills, which watches the killed processes until they recover.

    Args:
        run: the running processes.
        random: source of the choice between the lifecycle job and its JVM.
        stop: signal to end, which raises `KeyboardInterrupt`.
        outage_s: duration of an outage of the broker, in seconds.
        cluster: cluster that runs the tasks of the lifecycle job; None without one.
    """

    def __init__(
        self, run: Run, random: Random, stop: StopSignal, outage_s: float, cluster: StandaloneCluster | None = None
    ) -> None:
        self.kills: list[Kill] = []
        self._run = run
        self._random = random
        self._stop = stop
        self._outage_s = outage_s
        self._cluster = cluster
        self._broker_is_away = False
        self._watch_at_s = 0.0

    def tend(self, seconds: float) -> None:
        """Wait, restart dead processes as ``fleet up`` does, and note recoveries.

        Raises:
            FleetError: a process ended too often, or did not recover in time.
            KeyboardInterrupt: a stop was requested.
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
            self.rest(min(_POLL_S, rest_s))

    def rest(self, seconds: float) -> None:
        """Wait, without watching the processes.

        Raises:
            KeyboardInterrupt: a stop was requested.
        """
        if self._stop.wait(seconds):
            raise KeyboardInterrupt

    def await_recovery(self, victim: KillKind | None = None) -> None:
        """Wait until the process of a victim has recovered; None waits for all processes."""
        same = _OF_BROKER if victim in _OF_BROKER else (victim,)
        while any(kill.recovered_s is None and (victim is None or kill.victim in same) for kill in self.kills):
            self.tend(_POLL_S)

    def kill(self, victim: KillKind) -> None:
        """Send SIGKILL to a process, once it has recovered from earlier kills."""
        self.await_recovery(victim)
        if victim in OF_CLUSTER:
            self._kill_part_of_cluster(victim)
            return
        if victim is KillKind.LIFECYCLE and self._cluster is not None:
            self._await_batch()
        of = self._broker_pid() if victim in _OF_BROKER else self._alive(self._job(victim))
        killed = self._random.choice([of, *_jvm(of)]) if victim is KillKind.LIFECYCLE else of
        kill = Kill(victim, wall_clock_ms(), of, time.monotonic())
        os.kill(killed, signal.SIGKILL)
        self.kills.append(kill)
        if victim in _OF_BROKER:
            self._start_broker_after(self._outage_s if victim is KillKind.OUTAGE else 0.0)
            kill.mark = self._written()

    def _kill_part_of_cluster(self, victim: KillKind) -> None:
        assert self._cluster is not None, "only a cluster has these victims"
        limit_s = time.monotonic() + RECOVERY_S
        while not self._has_all_executors():
            if time.monotonic() > limit_s:
                raise FleetError(
                    f"not every worker of {self._cluster.master} had an executor within {RECOVERY_S:.0f} s; see the logs in "
                    f'"{self._cluster.place}"',
                    code="executors-not-started",
                )
            self.tend(_POLL_S)
        self._await_batch()
        worker = self._random.randrange(len(self._cluster.workers))
        of = self._cluster.workers[worker].pid
        kill = Kill(victim, wall_clock_ms(), of, time.monotonic(), mark=self._judged())
        if victim is KillKind.WORKER:
            self._cluster.kill_worker(worker)
            self._cluster.restart_worker(worker)
        else:
            for executor in self._cluster.executors(worker):
                executor.kill()
        self.kills.append(kill)

    def _await_batch(self) -> None:
        """Wait until the lifecycle job has begun a batch that it has not committed.

        Raises:
            FleetError: the job has begun no batch within `RECOVERY_S`.
        """
        limit_s = time.monotonic() + RECOVERY_S
        while not (self._job(KillKind.LIFECYCLE).alive() and unfinished(self._run.home.checkpoint) is not None):
            if time.monotonic() > limit_s:
                raise FleetError(
                    f'the lifecycle job has begun no batch within {RECOVERY_S:.0f} s; see the logs in "{self._run.home.logs}"',
                    code="batch-not-begun",
                )
            self.tend(_BATCH_POLL_S)

    def _has_all_executors(self) -> bool:
        cluster = self._cluster
        return cluster is not None and all(cluster.executors(one) for one in range(len(cluster.workers)))

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

    def _job(self, victim: KillKind) -> Job:
        return next(job for job in self._run.jobs if job.name == victim.value)

    def _alive(self, job: Job) -> int:
        """Wait until a job runs, and return its process id."""
        while not job.alive():
            self.tend(_POLL_S)
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
                    f"the {kill.victim} was killed {took_s:.0f} s ago and has not recovered; see the logs in "
                    f'"{self._run.home.logs}"',
                    code="job-not-back",
                )

    def _mark(self, kill: Kill) -> None:
        if kill.victim in _OF_BROKER or not self._job(kill.victim).alive() or self._job(kill.victim).pid == kill.of:
            return
        if kill.victim is KillKind.LIFECYCLE:
            kill.mark = self._judged()
        else:
            kill.mark = self._landed() if kill.victim is KillKind.LANDING else self._written()

    def _has_recovered(self, kill: Kill, mark: int) -> bool:
        """Return whether a device's row was landed or judged after the restart."""
        if kill.victim is KillKind.LIFECYCLE:
            return self._judged() > mark
        if kill.victim in OF_CLUSTER:
            return self._judged() > mark and self._has_all_executors()
        if kill.victim is KillKind.LANDING:
            return self._landed() > mark
        kill.due = kill.due or self._with_device_after(mark)
        return kill.due is not None and self._landed() > place(kill.due, 0)

    def _judged(self) -> int:
        reached = judged_up_to(self._run.home.checkpoint)
        return reached[0] if reached else -1

    def _landed(self) -> int:
        """Return the position of landing, see `merge.place`."""
        return landed_places(self._run.home, MESSAGES)[BRIDGE]

    def _written(self) -> int:
        return max((number for number, _ in list_segments(self._run.home.segments)), default=0)

    def _with_device_after(self, mark: int) -> int | None:
        """Return the first existing segment after ``mark`` with a device's row, if any."""
        for number, path in list_segments(self._run.home.segments):
            try:
                if number > mark and Origin.MQTT.value in read_segment(path)["origin"].to_pylist():
                    return number
            except FileNotFoundError:
                continue  # landed and deleted in the meantime
        return None


def _jvm(pid: int) -> list[int]:
    try:
        return [one.pid for one in psutil.Process(pid).children(recursive=True) if one.name() == "java"][:1]
    except psutil.Error:
        return []
