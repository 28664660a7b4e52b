"""Processes of a run: start, watch and stop them in order, and leave none behind."""

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
from typing import TYPE_CHECKING, Final, NoReturn, Self

import typer

from fleetpulse.core.errors import FleetError
from fleetpulse.core.rows import KAFKA
from fleetpulse.io.home.desired_state import RUNNING, get_desired
from fleetpulse.io.home.home import Home, bridge_job
from fleetpulse.io.mqtt.address import BrokerAddress, save_address
from fleetpulse.io.mqtt.embedded import broker_log
from fleetpulse.io.mqtt.embedded.broker import LOOPBACK, Broker, ListenerTls
from fleetpulse.io.mqtt.embedded.broker_limits import BrokerLimits
from fleetpulse.io.spark.jars import JARS, KAFKA_JARS, absent_jars, resolve_jars
from fleetpulse.io.spark.java import find_java
from fleetpulse.io.system.process import NOT_RESTARTED, read_status, write_status
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.paths import ROOT

if TYPE_CHECKING:
    from fleetpulse.settings import Settings

_STOP_S: Final = 20
_LEAST_FREE_BYTES: Final = 500_000_000  # required at the start of a run
_FULL_BYTES: Final = 50_000_000  # a start of the lifecycle job writes less
_MAX_ERROR_CHARS: Final = 700  # longer than any error message, whose end states what to do
_RESTART_WINDOW_S: Final = 600.0
_LOG_S: Final = 2.0  # interval between reads of the broker's log
_LOG_REPORT_S: Final = 60.0


class Job:
    """One process of a run: ``fleet job VERB``.

    Args:
        home: the home.
        name: name of the process, its log and its status file.
        arguments: further arguments of the verb.
        restarts: maximum number of restarts within `_RESTART_WINDOW_S`.
        verb: verb of the job; None if it equals the name.
        inherits_output: whether the process inherits standard output, instead of writing to its own log.
    """

    def __init__(
        self,
        home: Home,
        name: str,
        arguments: Sequence[str] = (),
        restarts: int = 0,
        verb: str | None = None,
        *,
        inherits_output: bool = False,
    ) -> None:
        self.home = home
        self.name = name
        self.arguments = list(arguments)
        self.restarts = restarts
        self.died = 0
        self._died_at_s: list[float] = []
        self.verb = verb or name
        self.inherits_output = inherits_output
        self.is_restarted = restarts > 0
        self.held = False  # stopped by the desired state
        self.supervised = False  # whether another supervisor starts it once this run no longer restarts it
        self.optional = False  # whether the run continues without it
        self.is_finite = False  # whether exit code 0 means that its work is done
        self._given_up_ms = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._group_killed = False

    @property
    def log(self) -> Path:
        """Log file of the process."""
        return self.home.logs / f"{self.name}.log"

    def start(self) -> None:
        """Start the process."""
        command = [sys.executable, "-P", "-m", "cli", "job", self.verb, "--home", str(self.home.path.absolute())]
        command += ["--parent", str(os.getpid()), *self.arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_inherited_path()])}
        self.home.run(self.name).unlink(missing_ok=True)
        with nullcontext() if self.inherits_output else self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the supervisor only: it stops the jobs in order
            )
        self._group_killed = False

    @property
    def pid(self) -> int | None:
        """Process id; None before the first start."""
        return self._process.pid if self._process else None

    def alive(self) -> bool:
        """Return whether the process runs; if it has ended, kill the rest of its group."""
        if self._process is None:
            return False
        if self._process.poll() is not None:
            self._kill_group()
            return False
        return True

    def watch(self) -> None:
        """Restart the process if it died; if the disk is full, wait for free space.

        Raises:
            FleetError: the process died too often, or must not be restarted.
        """
        if self._process is None or self.held or self.alive() or (self.is_finite and self._process.returncode == 0):
            return
        if self._given_up_ms:
            if self.supervised or self.optional:
                return
            raise self._ended()
        self._kill_group()
        if full := disk_full(self.home.path):
            if self.is_restarted:
                return
            raise FleetError(
                f"the {self.name} ended, because {full}; then run the same command again: it resumes where it stopped",
                code="job-ended",
            )
        now_s = time.monotonic()
        self._died_at_s = [at_s for at_s in self._died_at_s if now_s - at_s < _RESTART_WINDOW_S]
        if len(self._died_at_s) >= self.restarts:
            if self.supervised or self.optional:
                self._stop_restarting()
                return
            raise self._ended()
        self.died += 1
        self._died_at_s.append(now_s)
        self.start()

    def stop(self, patience_s: float = _STOP_S) -> None:
        """Send SIGTERM, wait, and kill the process and its children after ``patience_s``."""
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
            f"the {self.name} ended unexpectedly (exit {self._process.returncode}): {self._failure_text()}; "
            f"run the same command again: it resumes where it stopped",
            code="job-ended",
        )

    def _stop_restarting(self) -> None:
        """Stop restarting the process until its desired state is set again."""
        assert self._process is not None
        self._given_up_ms = wall_clock_ms()
        why = f"it ended unexpectedly (exit {self._process.returncode}): {last_error_line(self.log)}"
        write_status(self.home.run(self.name), {"state": NOT_RESTARTED, "why": why, "at_ms": self._given_up_ms})
        after = "its supervisor may start it" if self.supervised else f'the run continues without it; its log is "{self.log}"'
        typer.echo(f"the {self.name} is not restarted any more: {why}; {after}", err=True)

    def apply_desired_state(self, *, runs: bool, desired_at_ms: int = 0) -> None:
        """Stop or start the process to match the desired state.

        Args:
            runs: whether the desired state is running.
            desired_at_ms: instant at which the desired state was set, epoch milliseconds. If it is later
                than the last failed restart, the count of restarts begins at 0 again.
        """
        if self._given_up_ms and desired_at_ms > self._given_up_ms:
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

    def _failure_text(self) -> str:
        return "see its output above" if self.inherits_output else f'{last_error_line(self.log)}; its log is "{self.log}"'

    def _kill_group(self) -> None:
        """Kill the process group of the job, with its JVM and Python workers.

        Only the first call after an end has an effect: later the process id may be reused.
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


def require_space(path: Path) -> int:
    """Check that the disk of a folder has space for a run; return the free bytes.

    Raises:
        FleetError: it has less than 500 MB.
    """
    free = shutil.disk_usage(path).free
    if free < _LEAST_FREE_BYTES:
        raise FleetError(
            f'the disk of "{path}" is nearly full; expected 500 MB of free space, found {free // 1_000_000} MB; free some '
            f"space, or pass another --home",
            code="disk-nearly-full",
        )
    return free


def disk_full(path: Path) -> str | None:
    """Return a message that the disk of a folder is full; None if it has space."""
    free = shutil.disk_usage(path).free
    return f'the disk of "{path}" is full ({free // 1_000_000} MB left); free some space' if free < _FULL_BYTES else None


def last_error_line(log: Path) -> str:
    """Return the last error line of a log, or its last line if it has none."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-200:] if line.strip()]
    except OSError:
        return "it has no log"
    errors = [line for line in lines if "Error" in line or "fleet:" in line]
    return (errors or lines or ["no output"])[-1][:_MAX_ERROR_CHARS]


def _exit_on_signal(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def listener_tls(home: Home, settings: "Settings") -> ListenerTls | None:
    """Return the configured TLS files of the embedded broker; None if there are none."""
    named = (
        settings.broker_certificate,
        settings.broker_key,
        settings.broker_authority,
        settings.broker_client_authority,
        settings.broker_own_certificate,
        settings.broker_own_key,
    )
    files = [str((home.path / Path(file).expanduser()).absolute()) if file else "" for file in named]
    return ListenerTls(*files) if any(files) else None


class Run:
    """The processes of one run, as a context that leaves none running on exit.

    SIGTERM ends the context too, if the program has no handler for it.

    Args:
        home: the home, locked by the caller.
        alone: whether this run owns the home. If False, it is one of several services, and its jobs
            inherit its standard output.
    """

    def __init__(self, home: Home, *, alone: bool = True) -> None:
        self.home = home
        self.alone = alone
        self.jobs: list[Job] = []
        self.broker: Broker | None = None
        self._log: broker_log.BrokerLog | None = None  # log of the embedded broker
        self._log_read_s = 0.0
        self._log_reported_s = 0.0
        self._log_changed = False  # since the last report
        self.address: BrokerAddress | None = None

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # the default would end this process at once and orphan its jobs
            signal.signal(signal.SIGTERM, _exit_on_signal)
        for stale in (self.home.path / "run").glob("*.json") if self.alone else ():
            stale.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C must not leave some processes running.
        previous = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            for job in reversed(self.jobs):
                job.stop()
            if self.broker:
                self.broker.stop()
            if self._log:
                self._log.close()
                self.home.run(broker_log.STATUS).unlink(missing_ok=True)
            if self.alone or self.address:
                self.home.run("broker").unlink(missing_ok=True)
        finally:
            for number, handler in previous:
                signal.signal(number, signal.SIG_DFL if handler is _exit_on_signal else handler)

    def use_broker(
        self,
        address: BrokerAddress | None,
        port: int = 0,
        host: str = LOOPBACK,
        known_as: str | None = None,
        *,
        plain: bool = False,
    ) -> BrokerAddress:
        """Start the embedded broker, or use another one; save its address for the jobs.

        Args:
            address: address of another broker; None for the embedded one.
            port: port of the embedded broker; 0 for a free one.
            host: address at which the embedded broker listens.
            known_as: host name by which the jobs reach the embedded broker; None for ``host``.
            plain: whether the embedded broker may listen without TLS beyond the loopback interface.
        """
        if address is None:
            from fleetpulse.settings import load_settings, size_mb  # takes 0.1 s, and read-only verbs do not need it

            settings, log = load_settings(self.home.path), self.home.broker_log
            store_bytes = size_mb(settings.broker_store) * 1_024**2
            limits = BrokerLimits(settings.broker_connections, store_bytes, settings.broker_retained)
            self.home.run(broker_log.STATUS).unlink(missing_ok=True)
            self._log = broker_log.BrokerLog(log, wall_clock_ms())
            self.broker = Broker(
                self.home.broker,
                log,
                host,
                port,
                known_as=known_as,
                sync=settings.broker_sync,
                limits=limits,
                tls=listener_tls(self.home, settings),
                plain=plain,
                identity=self.home.identity(),
            )
            address = self.broker.start()
        self.address = address
        save_address(self.home.run("broker"), address)
        return address

    def start(self, name: str, arguments: Sequence[str] = (), restarts: int = 0) -> Job:
        """Start a job; jobs are stopped in the reverse order.

        Raises:
            FleetError: Java or a JAR is not available. Without this check, the job would fail and
                be restarted repeatedly.
        """
        if name == "lifecycle":
            find_java()
            jars = (*JARS, *KAFKA_JARS) if KAFKA in self.home.bridges() else JARS
            if absent := absent_jars(jars=jars):
                typer.echo(f"fleet: downloading {len(absent)} JARs of Spark into the project's cache (once)", err=True)
            resolve_jars(jars=jars)
        job = Job(self.home, name, arguments, restarts, inherits_output=not self.alone)
        self.jobs.append(job)
        desired = get_desired(self.home)
        if name == "lifecycle" and desired.state != RUNNING:
            typer.echo(f"the lifecycle job stays stopped by {desired.by}; start it with: ./fleet stream start", err=True)
            job.held = True
        else:
            job.start()
        return job

    def start_further_bridges(self, restarts: int) -> None:
        """Start the other bridges, once the first bridge is live.

        Only the first bridge replays recordings. No effect if the others were started.
        """
        names = self.home.bridges()[1:]
        if len(names) <= sum(job.verb == "bridge" for job in self.jobs) - 1 or self.status("bridge").get("state") != "live":
            return
        for bridge in names:
            job = Job(self.home, bridge_job(bridge), ["--name", bridge], restarts, "bridge", inherits_output=not self.alone)
            self.jobs.append(job)
            job.start()

    def stop(self, verb: str) -> None:
        """Stop the processes of a job, before the other jobs."""
        for job in self.jobs:
            if job.verb == verb:
                job.stop()

    def supervised(self, name: str, *, by_other: bool) -> None:
        """Set whether another supervisor starts a job once this run no longer restarts it."""
        for job in self.jobs:
            if job.name == name:
                job.supervised = by_other

    def alive(self, name: str) -> bool:
        """Return whether a job runs."""
        return any(job.name == name and job.alive() for job in self.jobs)

    def watch(self) -> None:
        """Check that everything runs, restart dead jobs, and apply the desired state.

        Raises:
            FleetError: the broker ended, or a job cannot be restarted.
        """
        if self.broker and not self.broker.alive():
            raise FleetError(
                f'the embedded broker ended unexpectedly: {last_error_line(self.broker.log)}; its log is "{self.broker.log}"; '
                f"run the same command again: it resumes where it stopped",
                code="broker-ended",
            )
        self._read_broker_log()
        for job in self.jobs:
            if job.name == "lifecycle":
                desired = get_desired(self.home)
                job.apply_desired_state(runs=desired.state == RUNNING, desired_at_ms=desired.at_ms)
            job.watch()

    def _read_broker_log(self) -> None:
        """Count failed logins and refused messages; a service reports them once a minute."""
        now_s = time.monotonic()
        if self._log is None or now_s - self._log_read_s < _LOG_S:
            return
        self._log_read_s = now_s
        if self._log.read(wall_clock_ms()):
            write_status(self.home.run(broker_log.STATUS), self._log.status())
            self._log_changed = True
        if self._log_changed and not self.alone and now_s - self._log_reported_s >= _LOG_REPORT_S:
            self._log_reported_s, self._log_changed = now_s, False
            typer.echo(f"fleet: {broker_log.refusals_of(self._log.status())}", err=True)

    def await_that(self, what: str, reached: Callable[[], bool], patience_s: float) -> None:
        """Wait for a condition, while watching the processes as `watch` does.

        Args:
            what: name of the awaited event, for the error.
            reached: condition, checked ten times a second.
            patience_s: timeout, in seconds.

        Raises:
            FleetError: the timeout passed, or a process ended that cannot be restarted.
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
        """Return the last status that a job wrote."""
        return read_status(self.home.run(name))
