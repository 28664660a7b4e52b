"""What is beside the stream in a run, Airflow above all: started when it has said its first verdicts, and never in its way."""

from cli.supervisor.airflow_env import HOST, folder, passwords
from cli.supervisor.cds import classes_are_kept
from cli.supervisor.processes import Job, Run
from fleetpulse.core.errors import FleetError
from fleetpulse.io.system.ports import free_port
from fleetpulse.io.system.process import GIVEN_UP

_RESTARTS = 2


def airflow_port(wanted: int) -> int:
    """Return a port of the loopback for Airflow: the one that is wanted, or any where that is 0.

    Raises:
        FleetError: it is in use.
    """

    def refused(why: str) -> FleetError:
        return FleetError(
            f"port {wanted} for Airflow cannot be had ({why}); name another (--airflow-port 0 takes a free one), or leave it "
            f"out: --no-airflow",
            code="port-in-use",
        )

    return free_port(HOST, wanted, refused)


class Beside:
    """Airflow of a run.

    Args:
        run: the run.
        port: of the UI.
    """

    def __init__(self, run: Run, port: int) -> None:
        self.run = run
        self.port = port
        self._job: Job | None = None
        self._has_run = False

    def invitation(self) -> list[str]:
        """Return where the UI will be, and who may come in; the passwords only where they have just been made."""
        known, fresh = passwords(self.run.home)
        lines = [f"airflow: http://{HOST}:{self.port}, from a minute or two after the first verdicts on"]
        if not fresh:
            return [*lines, f'users:   {", ".join(known)}; their passwords: "{folder(self.run.home) / "passwords.json"}"']
        lines += [f"user:    {user:9} password: {password}" for user, password in known.items()]
        return [*lines, f'         shown this once, and kept in "{folder(self.run.home) / "passwords.json"}"']

    def start(self) -> None:
        """Start it, where it has not been."""
        if self._job is None:
            self._job = self.run.start("airflow", ["--port", str(self.port)], restarts=_RESTARTS)
            self._job.optional = True

    def supervises(self) -> bool:
        """Whether its DAGs look after the lifecycle job: once it has run, and not after it was given up."""
        state = self.run.status("airflow").get("state")
        self._has_run = state == "running" or (self._has_run and state != GIVEN_UP)
        return self._has_run


class Classes:
    """Spark's classes, kept for later starts by the first run of an installation.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._asked = False

    def start(self) -> None:
        """See whether they are kept already, once, and keep them where they are not."""
        if not self._asked and not classes_are_kept():
            job = self.run.start("classes")
            job.optional = job.ends = True
        self._asked = True
