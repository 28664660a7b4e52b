"""The processes of a run: started in order, watched, stopped in order, and none is left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn, Self

import typer

from fleetpulse.core.errors import FleetError
from fleetpulse.core.rows import KAFKA
from fleetpulse.io.home.desired_state import RUNNING, get_desired
from fleetpulse.io.home.home import Home, bridge_job
from fleetpulse.io.mqtt.address import BrokerAddress, save_address
from fleetpulse.io.mqtt.broker import LOOPBACK, Broker
from fleetpulse.io.spark.jars import JARS, KAFKA_JARS, absent_jars, resolve_jars
from fleetpulse.io.spark.java import find_java
from fleetpulse.io.system.process import GIVEN_UP, read_status, write_status
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.paths import ROOT

_STOP_S: Final = 20
_FULL_BYTES: Final = 50_000_000  # what a start of the lifecycle job writes, and some more
_WORDS: Final = 700  # a sentence of ours ends with what to do: it is not to be cut off
_WITHIN_S: Final = 600.0


class Job:
    """One process of a run: ``fleet job VERB``.

    Args:
        home: the home.
        name: its name: of its log, and of its status file.
        arguments: further arguments.
        restarts: how often it is started again within `_WITHIN_S`, when it dies by itself.
        verb: the job; None where it is called like the process.
        aloud: whether it writes where we do, and not to a log of its own.
    """

    def __init__(
        self,
        home: Home,
        name: str,
        arguments: Sequence[str] = (),
        restarts: int = 0,
        verb: str | None = None,
        *,
        aloud: bool = False,
    ) -> None:
        self.home = home
        self.name = name
        self.arguments = list(arguments)
        self.restarts = restarts
        self.died = 0
        self._died_at_s: list[float] = []
        self.verb = verb or name
        self.aloud = aloud
        self.comes_back = restarts > 0
        self.held = False  # stopped, since it is to be
        self.supervised = False  # whether somebody beside us starts it again when we no longer do
        self.optional = False  # whether the run goes on without it
        self.ends = False  # whether it comes to an end, and need not run then
        self._given_up_ms = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._group_killed = False

    @property
    def log(self) -> Path:
        """Its log file."""
        return self.home.logs / f"{self.name}.log"

    def start(self) -> None:
        """Start it."""
        command = [sys.executable, "-P", "-m", "cli", "job", self.verb, "--home", str(self.home.path.absolute())]
        command += ["--parent", str(os.getpid()), *self.arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_inherited_path()])}
        self.home.run(self.name).unlink(missing_ok=True)
        with nullcontext() if self.aloud else self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for us: jobs are stopped in order
            )
        self._group_killed = False

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._process.pid if self._process else None

    def alive(self) -> bool:
        """Whether it runs; of one that has ended nothing is left."""
        if self._process is None:
            return False
        if self._process.poll() is not None:
            self._kill_group()
            return False
        return True

    def watch(self) -> None:
        """Start it again if it died; where the disk is full, when that has room again.

        Raises:
            FleetError: it has died too often, or is not to be started again.
        """
        if self._process is None or self.held or self.alive() or (self.ends and self._process.returncode == 0):
            return
        if self._given_up_ms:
            if self.supervised or self.optional:
                return
            raise self._ended()
        self._kill_group()
        if full := disk_full(self.home.path):
            if self.comes_back:
                return
            raise FleetError(
                f"the {self.name} ended, since {full}; then give the same command again: it goes on where it stopped",
                code="job-ended",
            )
        now_s = time.monotonic()
        self._died_at_s = [at_s for at_s in self._died_at_s if now_s - at_s < _WITHIN_S]
        if len(self._died_at_s) >= self.restarts:
            if self.supervised or self.optional:
                self._give_up()
                return
            raise self._ended()
        self.died += 1
        self._died_at_s.append(now_s)
        self.start()

    def stop(self, patience_s: float = _STOP_S) -> None:
        """Ask it to stop, wait, and stop it and its children by force where it does not come to an end."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                pass
        self._kill_group()
        self._process.wait()
        self.home.run(self.name).unlink(missing_ok=True)

    def _ended(self) -> FleetError:
        assert self._process is not None
        return FleetError(
            f"the {self.name} ended by itself (exit {self._process.returncode}): {self._last_words()}; "
            f"give the same command again: it goes on where it stopped",
            code="job-ended",
        )

    def _give_up(self) -> None:
        """Start it no more, until somebody says anew that it is to run."""
        assert self._process is not None
        self._given_up_ms = wall_clock_ms()
        why = f"it ended by itself (exit {self._process.returncode}): {last_words(self.log)}"
        write_status(self.home.run(self.name), {"state": GIVEN_UP, "why": why, "at_ms": self._given_up_ms})
        after = "it is left to who supervises it" if self.supervised else f'the run goes on without it; its log is "{self.log}"'
        typer.echo(f"the {self.name} is given up: {why}; {after}", err=True)

    def obey(self, *, runs: bool, said_ms: int = 0) -> None:
        """Stop it, or start it again, as is wanted; no effect where it is so.

        Args:
            runs: whether it is to run.
            said_ms: when that was said, epoch milliseconds: said after it was given up, it is a new beginning.
        """
        if self._given_up_ms and said_ms > self._given_up_ms:
            self._given_up_ms = 0
            self._died_at_s.clear()
            if runs:
                self.start()
        if runs == self.held:
            self.held = not runs
            if runs:
                self.start()
            else:
                self.stop()

    def _last_words(self) -> str:
        return "why stands above" if self.aloud else f'{last_words(self.log)}; its log is "{self.log}"'

    def _kill_group(self) -> None:
        """The JVM and its Python workers are in the job's own group: none outlives it.

        Once, when the job has just ended: later its number may be another's.
        """
        assert self._process is not None
        if self._group_killed:
            return
        self._group_killed = True
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def _inherited_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(ROOT)]


def disk_full(path: Path) -> str | None:
    """Say that the disk under a folder is full, and what to do; None where it has room."""
    free = shutil.disk_usage(path).free
    return f'the disk of "{path}" is full ({free // 1_000_000} MB left); free some space' if free < _FULL_BYTES else None


def last_words(log: Path) -> str:
    """Return the line of a log that says most about an end."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-200:] if line.strip()]
    except OSError:
        return "it has no log"
    telling = [line for line in lines if "Error" in line or "fleet:" in line]
    return (telling or lines or ["it said nothing"])[-1][:_WORDS]


def _leave(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


class Run:
    """The processes of one run; a context that leaves nothing running, also where SIGTERM ends it that nobody listens to.

    Args:
        home: the home, locked by the caller.
        alone: whether nothing else runs in it; otherwise it is one of several services, and its jobs write where it does.
    """

    def __init__(self, home: Home, *, alone: bool = True) -> None:
        self.home = home
        self.alone = alone
        self.jobs: list[Job] = []
        self.broker: Broker | None = None
        self.address: BrokerAddress | None = None

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # it would end us, and leave the jobs to find that out
            signal.signal(signal.SIGTERM, _leave)
        for stale in (self.home.path / "run").glob("*.json") if self.alone else ():
            stale.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C must not leave half of it running.
        previous = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            for job in reversed(self.jobs):
                job.stop()
            if self.broker:
                self.broker.stop()
            if self.alone or self.address:
                self.home.run("broker").unlink(missing_ok=True)
        finally:
            for number, handler in previous:
                signal.signal(number, signal.SIG_DFL if handler is _leave else handler)

    def use_broker(
        self, address: BrokerAddress | None, port: int = 0, host: str = LOOPBACK, known_as: str | None = None
    ) -> BrokerAddress:
        """Start the embedded broker, or use another one; say so where the jobs look for it.

        Args:
            address: of another broker; None starts the embedded one.
            port: of the embedded one; 0 takes a free one.
            host: the address at which that listens.
            known_as: the name by which the jobs reach it; None where they do by ``host``.
        """
        if address is None:
            from fleetpulse.settings import load_settings  # it costs a tenth of a second, and the verbs that look need none

            sync = load_settings(self.home.path).broker_sync
            self.broker = Broker(self.home.broker, self.home.logs / "broker.log", host, port, known_as=known_as, sync=sync)
            address = self.broker.start()
        self.address = address
        save_address(self.home.run("broker"), address)
        return address

    def start(self, name: str, arguments: Sequence[str] = (), restarts: int = 0) -> Job:
        """Start a job; jobs are stopped in the reverse order.

        Raises:
            FleetError: Java or the JARs that the jobs need cannot be had: it would die of it, and be started again.
        """
        if name == "lifecycle":
            find_java()
            jars = (*JARS, *KAFKA_JARS) if KAFKA in self.home.bridges() else JARS
            if absent := absent_jars(jars=jars):
                typer.echo(f"fleet: fetching {len(absent)} JARs of Spark into the project's cache (once)", err=True)
            resolve_jars(jars=jars)
        job = Job(self.home, name, arguments, restarts, aloud=not self.alone)
        self.jobs.append(job)
        wanted = get_desired(self.home)
        if name == "lifecycle" and wanted.what != RUNNING:
            typer.echo(f"the lifecycle job stays stopped, as {wanted.by} wants it; start it: ./fleet stream start", err=True)
            job.held = True
        else:
            job.start()
        return job

    def start_further_bridges(self, restarts: int) -> None:
        """Start the bridges beside the first, once that is live: history is its alone. No effect where they were started."""
        names = self.home.bridges()[1:]
        if len(names) <= sum(job.verb == "bridge" for job in self.jobs) - 1 or self.status("bridge").get("state") != "live":
            return
        for bridge in names:
            job = Job(self.home, bridge_job(bridge), ["--name", bridge], restarts, "bridge", aloud=not self.alone)
            self.jobs.append(job)
            job.start()

    def stop(self, verb: str) -> None:
        """Stop the processes of a job before the others, where they run."""
        for job in self.jobs:
            if job.verb == verb:
                job.stop()

    def supervised(self, name: str, *, by_somebody: bool) -> None:
        """Say whether somebody beside us starts a job again when we no longer do."""
        for job in self.jobs:
            if job.name == name:
                job.supervised = by_somebody

    def alive(self, name: str) -> bool:
        """Whether a job runs."""
        return any(job.name == name and job.alive() for job in self.jobs)

    def watch(self) -> None:
        """See that everything runs.

        Raises:
            FleetError: something ended by itself.
        """
        if self.broker and not self.broker.alive():
            raise FleetError(
                f'the embedded broker ended by itself: {last_words(self.broker.log)}; its log is "{self.broker.log}"; '
                f"give the same command again: it goes on where it stopped",
                code="broker-ended",
            )
        for job in self.jobs:
            if job.name == "lifecycle":
                word = get_desired(self.home)
                job.obey(runs=word.what == RUNNING, said_ms=word.at_ms)
            job.watch()

    def await_that(self, what: str, reached: Callable[[], bool], patience_s: float) -> None:
        """Wait until something is reached, seeing that everything runs.

        Args:
            what: for the error.
            reached: asked ten times a second.
            patience_s: after so long without it, that is an error.

        Raises:
            FleetError: it took too long, or something ended by itself.
        """
        limit = time.monotonic() + patience_s
        while not reached():
            self.watch()
            if time.monotonic() > limit:
                raise FleetError(
                    f'{what} took longer than {patience_s:.0f} s; see the logs in "{self.home.logs}", and try again',
                    code="wait-timeout",
                )
            time.sleep(0.1)

    def status(self, name: str) -> dict[str, object]:
        """Return what a job last said of itself."""
        return read_status(self.home.run(name))
