"""``fleet doctor``: checks of the machine, the home and the cluster, one line each.

Rule 1: a check calls the code that the platform itself uses; nothing is downloaded, and the home is
not changed. Scratch files are removed.
Rule 2: each check has a time limit, because a mount without its server blocks forever.
Rule 3: a failed check does not stop the others. A check that it makes impossible is skipped, with the
reason.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.common.errors import expected_error
from cli.common.options import DEFAULT_HOME, HomeOption, RowsOption
from cli.common.output import as_json
from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home

if TYPE_CHECKING:
    from fleetpulse.io.spark.session import SparkResources
    from fleetpulse.settings import Settings

_LIMIT_S: Final = 60.0
_SESSION_LIMIT_S: Final = 900.0  # more than the limits of its parts: start of a JVM, an executor, the first tasks
_NAME_WIDTH: Final = 15
_NEEDED_BY_A_SESSION: Final = frozenset({"java", "home", "jars", "hard links", "renames", "locks", "secrets", "spark master"})


class CheckState(StrEnum):
    """Result of a check."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


class Skipped(Exception):
    """A check that does not apply; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Check:
    """Check of one thing.

    Attributes:
        name: checked thing.
        run: function that returns the finding. It raises FleetError if the check fails, and
            `Skipped` if it does not apply.
        limit_s: time limit, seconds.
    """

    name: str
    run: Callable[[], str]
    limit_s: float = _LIMIT_S


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check.

    Attributes:
        check: checked thing.
        state: result.
        found: finding; for a failure, also the expectation and the remedy.
        code: code of the error; empty without one.
    """

    check: str
    state: CheckState
    found: str
    code: str = ""


@dataclass(slots=True)
class _Context:
    """State of a call: home, options, settings (once their check has read them), and failed checks."""

    home: Home
    port: int
    airflow_port: int
    page_port: int
    settings: "Settings | None" = None
    spark: "SparkResources | None" = None
    failed: set[str] = field(default_factory=set[str])


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    home: HomeOption = DEFAULT_HOME,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the embedded broker; 0 for no check.")] = 1883,
    airflow_port: Annotated[
        int, typer.Option("--airflow-port", min=0, max=65535, help="Port of the Airflow UI; 0 for no check.")
    ] = 8080,
    page_port: Annotated[
        int, typer.Option("--page-port", min=0, max=65535, help="Port of the operations page; 0 for no check.")
    ] = 8090,
    quick: Annotated[bool, typer.Option("--quick", help="Start no Spark session on a cluster.")] = False,
    json_lines: RowsOption = False,
) -> None:
    """Check the machine, the home and the Spark cluster, with the remedy of each failure.

    It works before a home is created and while it runs, and changes nothing. The exit code is 1 if a
    check failed. On a cluster, a short Spark session starts, which needs free cores beside the job.
    """
    failed = 0
    for one in checked(Home(home), port, airflow_port, page_port, quick=quick):
        failed += one.state is CheckState.FAILED
        if json_lines:
            as_json([{"check": one.check, "state": one.state.value, "found": one.found, "code": one.code}])
        else:
            typer.echo(f"{one.state.value:8}{one.check:{_NAME_WIDTH}}{one.found}")
    if failed:
        raise typer.Exit(1)


def checked(home: Home, port: int, airflow_port: int, page_port: int, *, quick: bool) -> Iterator[Finding]:
    """Run all checks, and yield each result as soon as it exists.

    Args:
        home: the home, which need not exist yet.
        port: port of the embedded broker; 0 for no check.
        airflow_port: port of Airflow's UI; 0 for no check.
        page_port: port of the HTTP server; 0 for no check.
        quick: whether to start no Spark session.
    """
    context = _Context(home, port, airflow_port, page_port)
    for check in (
        Check("python", _python),
        Check("java", _java, 200.0),  # it runs each Java that it finds, for up to a minute
        Check("home", partial(_home, context)),
        Check("settings", partial(_settings, context)),
        Check("jars", partial(_jars, context)),
        Check("disk", partial(_disk, context)),
        Check("file system", partial(_file_system, context)),
        Check("hard links", partial(_in_scratch, context, "links")),
        Check("renames", partial(_in_scratch, context, "renames")),
        Check("locks", partial(_in_scratch, context, "locks"), 90.0),
        Check("syncs", partial(_in_scratch, context, "syncs")),
        Check("clock", partial(_clock, context)),
        Check("secrets", partial(_secrets, context)),
        Check("broker port", partial(_broker_port, context)),
        Check("airflow port", partial(_airflow_port, context)),
        Check("page port", partial(_page_port, context)),
        Check("spark master", partial(_spark_master, context)),
        Check("spark session", partial(_spark_session, context, quick=quick), _SESSION_LIMIT_S),
    ):
        finding = run_check(check)
        if finding.state is CheckState.FAILED:
            context.failed.add(check.name)
        yield finding


def run_check(check: Check) -> Finding:
    """Run a check within its time limit.

    A check that exceeds the limit keeps running in a daemon thread, which ends with this process.
    """
    results: list[Finding | BaseException] = []

    def work() -> None:
        try:
            results.append(Finding(check.name, CheckState.OK, check.run()))
        except Skipped as reason:
            results.append(Finding(check.name, CheckState.SKIPPED, str(reason)))
        except BaseException as error:  # noqa: BLE001 - the thread that waits reports it
            results.append(error)

    thread = Thread(target=work, name=check.name, daemon=True)
    thread.start()
    thread.join(check.limit_s)
    if not results:
        return Finding(
            check.name,
            CheckState.FAILED,
            f"the check has not ended within {check.limit_s:.0f} s; a file system or a host that it needs does not answer; see "
            f"whether the mounts of the home and the cache, and the hosts of the settings, can be reached",
            "check-timeout",
        )
    result = results[0]
    if isinstance(result, Finding):
        return result
    if (refused := expected_error(result)) is not None:
        return Finding(check.name, CheckState.FAILED, str(refused), refused.code)
    if isinstance(result, OSError):
        found = f"the check cannot be executed ({result}); see whether this user may read and write the named path"
        return Finding(check.name, CheckState.FAILED, found, "check-impossible")
    raise result  # a bug


def _python() -> str:
    from cli.common.bootstrap import MINIMUM_PYTHON, wrong_python
    from cli.common.packages import require_packages
    from fleetpulse.paths import ROOT

    if sys.version_info < MINIMUM_PYTHON:
        raise FleetError(wrong_python(sys.version_info[:3]), code="python-too-old")
    count = require_packages(ROOT / "requirements" / "runtime.txt")
    return f"Python {'.'.join(map(str, sys.version_info[:3]))} with the {count} locked packages, in {sys.prefix}"


def _java() -> str:
    from fleetpulse.io.spark.java import installed_java

    version, home = installed_java()
    return f"Java {version} in {home}"


def _home(context: _Context) -> str:
    from fleetpulse.io.home.preconditions import require_own
    from fleetpulse.io.home.services import in_use

    if context.home.exists():
        context.home.record()
    require_own(context.home)
    if not context.home.exists():
        return f"not created yet: {context.home.path}"
    return f"{context.home.path}, {'in use' if in_use(context.home) else 'not in use'}"


def _settings(context: _Context) -> str:
    from cli.supervisor.processes import listener_tls
    from fleetpulse.io.kafka.config import parse_kafka
    from fleetpulse.io.spark.session import SparkResources
    from fleetpulse.settings import load_settings
    from fleetpulse.web.server import server_tls

    settings = load_settings(context.home.path)
    if settings.kafka:
        parse_kafka(settings.kafka)
    if (tls := listener_tls(context.home, settings)) is not None:
        tls.check()
    if (served := server_tls(context.home, settings)) is not None:
        served.load()
    context.spark = SparkResources.of(context.home.path, settings)
    context.settings = settings
    return f"valid: {len(settings.model_fields_set)} of {len(type(settings).model_fields)} are set"


def _valid(context: _Context) -> "tuple[Settings, SparkResources]":
    if context.settings is None or context.spark is None:
        raise Skipped("the settings are not valid")
    return context.settings, context.spark


def _jars(context: _Context) -> str:
    from fleetpulse.io.spark.jars import JARS, KAFKA_JARS, require_jars
    from fleetpulse.paths import cache_dir

    needed = (*JARS, *KAFKA_JARS) if context.settings is not None and context.settings.kafka else JARS
    require_jars(jars=needed)
    return f"{len(needed)} JARs with their checksums, in {cache_dir() / 'jars'}"


def _disk(context: _Context) -> str:
    from cli.supervisor.processes import require_space
    from fleetpulse.io.home.preconditions import existing_folder

    return f"{require_space(existing_folder(context.home)) / 1e9:,.1f} GB free"


def _file_system(context: _Context) -> str:
    from fleetpulse.io.home.preconditions import existing_folder
    from fleetpulse.io.system.file_systems import mount_of, require_suitable

    shared = context.spark is not None and context.spark.cluster is not None
    return require_suitable(mount_of(existing_folder(context.home)), shared=shared)


def _in_scratch(context: _Context, required: str) -> str:
    from fleetpulse.io.system.file_systems import require_hard_links, require_locks, require_renames, require_syncs

    def require_links(scratch: Path) -> None:
        (scratch / "linked").touch()
        require_hard_links(scratch / "linked", scratch / "link")

    requirements: dict[str, tuple[Callable[[Path], None], str]] = {
        "links": (require_links, "supported, and replace no file"),
        "renames": (require_renames, "replace an existing file"),
        "locks": (require_locks, "exclude a second process of this host"),
        "syncs": (require_syncs, "supported for files and folders"),
    }
    require, holds = requirements[required]
    with _scratch(context.home) as scratch:
        require(scratch)
    return holds


@contextmanager
def _scratch(home: Home) -> Iterator[Path]:
    """Provide a folder on the file system of a home, and remove it on exit."""
    from fleetpulse.io.home.preconditions import existing_folder

    with TemporaryDirectory(prefix=".doctor-", dir=existing_folder(home), ignore_cleanup_errors=True) as scratch:
        yield Path(scratch)


def _clock(context: _Context) -> str:
    from fleetpulse.io.home.preconditions import require_clock

    return require_clock(context.home)


def _secrets(context: _Context) -> str:
    from fleetpulse.io.home.preconditions import require_private_secrets
    from fleetpulse.web.server import server_tls

    settings, spark = _valid(context)
    named = [context.home.path / Path(file).expanduser() for file in (settings.broker_key, settings.broker_own_key) if file]
    if (served := server_tls(context.home, settings)) is not None:
        named.append(served.secret)
    if spark.cluster is not None:
        from fleetpulse.io.spark.cluster import read_secret

        read_secret(spark.cluster.secret)
        named.append(spark.cluster.secret)
    return f"files that only their owner can read: {require_private_secrets(context.home, named)}"


def _broker_port(context: _Context) -> str:
    from fleetpulse.io.home.services import Service, runs
    from fleetpulse.io.mqtt.address import load_address
    from fleetpulse.io.mqtt.embedded.broker import LOOPBACK, await_admission, require_free_port

    if context.home.exists() and runs(context.home, Service.BROKER):
        address = load_address(context.home.run("broker"))
        if await_admission(address):
            return f"the home's broker accepts clients on {address}"
        raise FleetError(
            f'the broker of the running home on {address} refuses connections; see "{context.home.broker_log}"',
            code="broker-refuses",
        )
    if not context.port:
        raise Skipped("--port 0")
    return f"port {require_free_port(LOOPBACK, context.port)} is free"


def _airflow_port(context: _Context) -> str:
    from cli.supervisor.sidecars import airflow_port
    from fleetpulse.io.system.process import read_status

    if not context.airflow_port:
        raise Skipped("--airflow-port 0")
    status = read_status(context.home.run("airflow"))
    if context.home.exists() and context.home.owner() is not None and status.get("url"):
        return f"the home's Airflow ({status.get('state')}) is at {status['url']}"
    return f"port {airflow_port(context.airflow_port)} is free"


def _page_port(context: _Context) -> str:
    from fleetpulse.io.home.home import PAGE
    from fleetpulse.io.home.services import page_holder
    from fleetpulse.io.system.process import read_status
    from fleetpulse.web.server import page_port

    if context.home.exists() and page_holder(context.home) is not None:
        status = read_status(context.home.run(PAGE))
        return f"the home's page ({status.get('state')}) is at {status.get('url')}"
    if not context.page_port:
        raise Skipped("--page-port 0")
    return f"port {page_port(context.page_port)} is free"


def _spark_master(context: _Context) -> str:
    from fleetpulse.io.spark.cluster import reach_master

    cluster = _valid(context)[1].cluster
    if cluster is None:
        raise Skipped("tasks run in the process of the job (spark_master is local)")
    host = reach_master(cluster)
    return f"{cluster.master} is reached from {cluster.driver_host or host}"


def _spark_session(context: _Context, *, quick: bool) -> str:
    from batch.common.spark_session import try_session

    size = _valid(context)[1]
    if size.cluster is None:
        raise Skipped("tasks run in the process of the job (spark_master is local)")
    if quick:
        raise Skipped("--quick")
    if failed := context.failed & _NEEDED_BY_A_SESSION:
        raise Skipped(f"another check failed: {', '.join(sorted(failed))}")
    if not context.home.exists():
        raise Skipped("there is no home yet that executors could share")
    with _scratch(context.home) as scratch:
        try_session(scratch, size)
    return "the master accepts the secret; executors run tasks, and share the home's files, renames, links and locks"
