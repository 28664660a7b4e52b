"""Optional processes of a run: the HTTP server, Airflow, the publisher, the creation of Spark's class archive.

The stream does not depend on them. The HTTP server starts with the run, the others after the first verdicts.
"""

from collections.abc import Sequence

from cli.supervisor.airflow_env import HOST, airflow_home, passwords
from cli.supervisor.cds import archive_is_ready
from cli.supervisor.processes import Job, Run
from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import PAGE, PUBLISHER, Home
from fleetpulse.io.home.services import page_holder, page_served_by
from fleetpulse.io.system.ports import free_port
from fleetpulse.io.system.process import NOT_RESTARTED
from fleetpulse.settings import Settings
from fleetpulse.web.access import login_address
from fleetpulse.web.server import LOOPBACK, Listener, page_port, server_tls

_RESTARTS = 2


def airflow_port(port: int) -> int:
    """Return a free loopback port for Airflow.

    Args:
        port: requested port; 0 for any free one.

    Raises:
        FleetError: the port is in use.
    """

    def refused(why: str) -> FleetError:
        return FleetError(
            f"cannot bind port {port} for Airflow ({why}); choose another (--airflow-port 0 takes a free one), or skip "
            f"Airflow: --no-airflow",
            code="port-in-use",
        )

    return free_port(HOST, port, refused)


class _Sidecar:
    """Process of a run that is started once, and without which the run continues.

    Args:
        run: the run.
        name: name of the process.
        arguments: its arguments.
        restarts: number of restarts.
    """

    def __init__(self, run: Run, name: str, arguments: Sequence[str], restarts: int) -> None:
        self.run = run
        self._arguments = name, arguments, restarts
        self._job: Job | None = None

    def start(self) -> None:
        """Start the process, unless it was started."""
        if self._job is None:
            self._job = self.run.start(*self._arguments)
            self._job.optional = True


class AirflowSidecar(_Sidecar):
    """Airflow of a run.

    Args:
        run: the run.
        port: port of the UI.
    """

    def __init__(self, run: Run, port: int) -> None:
        super().__init__(run, "airflow", ["--port", str(port)], _RESTARTS)
        self.port = port
        self._has_run = False

    def invitation(self) -> list[str]:
        """Return lines with the address of the UI and its users.

        They contain the passwords only if this call created them.
        """
        known, fresh = passwords(self.run.home)
        lines = [f"airflow: http://{HOST}:{self.port}, available one or two minutes after the first verdicts"]
        if not fresh:
            return [
                *lines,
                f'users:   {", ".join(known)}; their passwords are in "{airflow_home(self.run.home) / "passwords.json"}"',
            ]
        lines += [f"user:    {user:9} password: {password}" for user, password in known.items()]
        return [*lines, f'         shown only once, and stored in "{airflow_home(self.run.home) / "passwords.json"}"']

    def supervises(self) -> bool:
        """Return whether Airflow's DAGs supervise the lifecycle job.

        True once Airflow has run, until the run no longer restarts it.
        """
        state = self.run.status("airflow").get("state")
        self._has_run = state == "running" or (self._has_run and state != NOT_RESTARTED)
        return self._has_run


def page_listener(home: Home, settings: Settings, port: int) -> Listener:
    """Return the listener of a run's HTTP server.

    Args:
        home: home of the run.
        settings: its settings.
        port: requested port; 0 for any free one.

    Raises:
        FleetError: the port is in use, a file of TLS cannot be used, or another server of the home runs.
    """
    if (other := page_holder(home)) is not None:
        raise page_served_by(home, other)
    tls = server_tls(home, settings)
    if tls is not None:
        tls.context()
    chosen = page_port(port, alternative=", or start no server with --no-page")
    return Listener(LOOPBACK, chosen, tls, settings.serve_hosts)


class PageSidecar(_Sidecar):
    """HTTP server of a run.

    Args:
        run: the run.
        listener: its address.
    """

    def __init__(self, run: Run, listener: Listener) -> None:
        super().__init__(run, PAGE, ["--port", str(listener.port)], _RESTARTS)
        self._url = listener.url

    def invitation(self) -> list[str]:
        """Return lines with a one-time address of the page."""
        return [
            f"page:    {login_address(self.run.home, self._url)}",
            f"         valid once, for 10 minutes; print a new one with: ./fleet access login --home {self.run.home.path}",
        ]


class PublisherSidecar(_Sidecar):
    """Publisher of verdicts, if the setting ``publish_verdicts`` is on.

    Args:
        run: the run.
        settings: settings of the home.
    """

    def __init__(self, run: Run, settings: Settings) -> None:
        super().__init__(run, PUBLISHER, (), settings.restarts)
        self._is_on = settings.publish_verdicts

    def start(self) -> None:
        """Start the publisher, unless it was started or the setting is off."""
        if self._is_on:
            super().start()


class ClassArchiveSidecar:
    """Class archive of Spark, created by the first run of an installation.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._asked = False

    def start(self) -> None:
        """Create the archive if it does not exist; only the first call has an effect."""
        if not self._asked and not archive_is_ready():
            job = self.run.start("classes")
            job.optional = job.is_finite = True
        self._asked = True
