"""``fleet service``: one part of a home in the foreground (systemd or container).

Rule 1: The exit code is 0 after SIGTERM, and 1 with an error message if the part ended by itself.
The supervisor (systemd or the container runtime) restarts it.
Rule 2: The service waits for the parts that it depends on, up to a time limit, and prints which.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.commands.run.serve import PORT
from cli.common.options import DEFAULT_HOME, HomeOption
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.io.home.desired_state import RUNNING, get_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import Service, served, services
from fleetpulse.io.mqtt.address import BrokerAddress, load_address, parse_broker_url
from fleetpulse.io.mqtt.embedded.broker import LOOPBACK, await_admission
from fleetpulse.io.system.process import StopSignal, read_status, status_age_s

if TYPE_CHECKING:
    from cli.supervisor.processes import Job, Run

_BROKER_PORT: Final = 1883
_PATIENCE_S: Final = 120.0
_WATCH_S: Final = 0.5
_SILENT_S: Final = 60.0  # a part writes its status once a second
_JUDGED_S: Final = 30.0  # shorter than the stop timeout of the supervisor
_STARTING_S: Final = 600.0  # a JVM starts, and reads a large state


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("service")(service)


def service(
    name: Annotated[Service, typer.Argument(help="Part to run.")],
    home: HomeOption = DEFAULT_HOME,
    check: Annotated[bool, typer.Option("--check", help="Only check its health; exit code 1 if it is unhealthy.")] = False,
    broker: Annotated[str | None, typer.Option("--broker", help="bridge: use this broker, mqtt://HOST:PORT or mqtts://.")] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="broker, page: port, by default 1883 and 8090; 0 for any free port."),
    ] = None,
    listen: Annotated[str, typer.Option("--listen", help="broker, page: address to listen on.")] = LOOPBACK,
    known_as: Annotated[
        str | None, typer.Option("--known-as", help="broker: host name at which the bridge connects to it.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="broker, page: allow --listen beyond the loopback interface without TLS.")
    ] = False,
) -> None:
    """Run one part of a home in the foreground, for systemd or a container.

    SIGTERM stops it cleanly. The supervisor must restart it if it ends with exit code 1.
    """
    opened = Home(home)
    if check:
        typer.echo(check_health(opened, name))
        return
    if broker is not None and name is not Service.BRIDGE:
        raise Misuse(
            "--broker applies only to the service bridge; omit it (by default, the bridge uses the broker of the home)",
            code="option-conflict",
        )
    from cli.supervisor.flush import stop_listening  # imported late: --check needs none of these, and they take half a second
    from cli.supervisor.processes import Run
    from cli.supervisor.sidecars import PublisherSidecar
    from fleetpulse.planning.model import first_key_groups
    from fleetpulse.settings import load_settings

    stop = StopSignal().on_signals()
    address = parse_broker_url(broker) if broker else None
    settings = load_settings(home)
    makes = name is Service.BROKER or address is not None
    if makes:
        key_groups = first_key_groups(settings.task_cores)
        opened.prepare(settings.deployment(), settings.chosen_identity(), key_groups, settings.files())
    elif not _await(stop, "the home, which the service broker creates", opened.exists):
        return
    opened.record()
    with served(opened, name), Run(opened, alone=False) as run:
        if makes:
            opened.divide(settings.all_bridges())
        if name is Service.BROKER:
            address = run.use_broker(None, _BROKER_PORT if port is None else port, listen, known_as, plain=plain)
            _print(f"the broker is listening on {address}")
            job = None
        elif name is Service.PAGE:
            options = ["--port", str(PORT if port is None else port), "--listen", listen, *(["--plain"] if plain else [])]
            job = run.start(name, options)
        elif (job := _start_part(run, name, address, stop)) is None:
            return
        if name is Service.BRIDGE:
            PublisherSidecar(run, settings).start()
        _watch(run, job, stop)
        _print(f"the {name} is stopping")
        if name is Service.BRIDGE:
            stop_listening(run, ("bridge",), partial(_is_judged_by_services, opened), _JUDGED_S)


def _start_part(run: "Run", name: Service, address: BrokerAddress | None, stop: StopSignal) -> "Job | None":
    """Start a part once its dependencies exist; return None if stopped before that."""
    if address is not None:
        if Service.BROKER in services(run.home):
            raise FleetError(
                f'the broker of "{run.home.path}" already runs as a service; stop it, or omit --broker',
                code="service-runs-already",
            )
        run.use_broker(address)
    elif name is Service.BRIDGE and not _await(stop, "the broker's address", run.home.run("broker").exists):
        return None
    return run.start(name)


def _await(stop: StopSignal, what: str, exists: Callable[[], bool]) -> bool:
    """Wait for a dependency; return False if this process is stopped meanwhile.

    Args:
        stop: stop request of this process.
        what: name of the dependency, for messages.
        exists: function that returns whether the dependency exists.

    Raises:
        FleetError: the dependency does not exist after two minutes.
    """
    limit, reported = time.monotonic() + _PATIENCE_S, False
    while not exists():
        if not reported:
            _print(f"waiting for {what}")
            reported = True
        if stop.wait(_WATCH_S):
            return False
        if time.monotonic() > limit:
            raise FleetError(
                f"{what} does not exist after {_PATIENCE_S:.0f} s; start it with: ./fleet service broker", code="wait-timeout"
            )
    return True


def _is_judged_by_services(home: Home) -> bool:
    """Whether running services judge the messages that the bridge wrote."""
    return {Service.LANDING, Service.LIFECYCLE} <= {*services(home)} and get_desired(home).state == RUNNING


def _watch(run: "Run", job: "Job | None", stop: StopSignal) -> None:
    held = job is not None and job.held
    while not stop.wait(_WATCH_S):
        run.watch()
        if job is None:
            continue
        if job.verb == Service.BRIDGE:
            run.start_further_bridges(0)
        if job.held != held:
            held = job.held
            _print(f"the {job.name} job {'stops' if held else 'starts'}, as requested by {get_desired(run.home).by}")


def check_health(home: Home, name: Service) -> str:
    """Describe the health of a service.

    Raises:
        FleetError: the service does not run, or is unhealthy.
    """
    home.record()
    if name not in services(home):
        start = f"./fleet service {name} --home {home.path}"
        raise FleetError(
            f'the {name} of "{home.path}" does not run as a service; start it with: {start}', code="service-not-running"
        )
    if name is Service.BROKER:
        address = load_address(home.run("broker"))
        if not await_admission(address, 2.0):
            raise FleetError(f'the broker on {address} refuses connections; see "{home.broker_log}"', code="broker-refuses")
        return f"the broker accepts clients on {address}"
    desired = get_desired(home)
    if name is Service.LIFECYCLE and desired.state != RUNNING:
        return f"the lifecycle job is stopped, as requested by {desired.by}"
    return _by_status(home, name)


def _by_status(home: Home, name: Service) -> str:
    status, silence_s = read_status(home.run(name)), status_age_s(home.run(name), time.time())
    if not status or silence_s is None:
        raise FleetError(
            f"the {name} has not reported a status yet; wait a moment, then see its output", code="service-without-status"
        )
    state = str(status.get("state", "running"))
    is_starting = name is Service.LIFECYCLE and state == "starting"
    if silence_s > (_STARTING_S if is_starting else _SILENT_S):
        raise FleetError(
            f"the {name} ({state}) has reported no status for {silence_s:.0f} s; see its output", code="service-silent"
        )
    if problem := status.get("problem"):
        raise FleetError(f"the {name} ({state}): {problem}", code="service-unwell")
    return f"the {name}: {state}"


def _print(line: str) -> None:
    typer.echo(f"fleet: {line}", err=True)
