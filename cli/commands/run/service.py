"""``fleet service``: one part of a home in the foreground, for a container or a unit; whoever supervises it starts it again.

Rule 1: it ends with exit code 0 when it is asked to, and with 1 and a sentence when its part ended by itself.
Rule 2: what it needs of another part it waits for, with a limit, and says what for.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.common.options import DEFAULT_HOME, HomeOption
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.io.home.desired_state import RUNNING, get_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import Service, served, services
from fleetpulse.io.mqtt.address import BrokerAddress, load_address, parse_broker_url
from fleetpulse.io.mqtt.broker import LOOPBACK, await_admission
from fleetpulse.io.system.process import Stop, read_status, silent_s

if TYPE_CHECKING:
    from cli.supervisor.processes import Job, Run

_PATIENCE_S: Final = 120.0
_WATCH_S: Final = 0.5
_SILENT_S: Final = 60.0  # a part writes its status once a second
_JUDGED_S: Final = 30.0  # less than whoever supervises us waits for our end
_STARTING_S: Final = 600.0  # a JVM, and a large state that is read back


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("service")(service)


def service(
    name: Annotated[Service, typer.Argument(help="Which part.")],
    home: HomeOption = DEFAULT_HOME,
    check: Annotated[bool, typer.Option("--check", help="Only say whether it is well: exit code 1 where it is not.")] = False,
    broker: Annotated[str | None, typer.Option("--broker", help="bridge: another broker, mqtt://HOST:PORT or mqtts://.")] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="broker: its port; 0 takes a free one.")] = 1883,
    listen: Annotated[str, typer.Option("--listen", help="broker: the address at which it listens.")] = LOOPBACK,
    known_as: Annotated[
        str | None, typer.Option("--known-as", help="broker: the host name by which the bridge reaches it.")
    ] = None,
) -> None:
    """Run one part of a home in the foreground, for systemd or containers; SIGTERM stops it in order."""
    opened = Home(home)
    if check:
        typer.echo(how_it_is(opened, name))
        return
    if broker is not None and name is not Service.BRIDGE:
        raise Misuse(
            "--broker is for the bridge; without it that waits for the service broker of the same home", code="option-conflict"
        )
    from cli.supervisor.flush import stop_listening  # these cost half a second, and the check needs none
    from cli.supervisor.processes import Run
    from fleetpulse.settings import load_settings

    stop = Stop().on_signals()
    address = parse_broker_url(broker) if broker else None
    settings = load_settings(home)
    makes = name is Service.BROKER or address is not None
    if makes:
        opened.prepare(settings.deployment(), settings.chosen_identity())
    elif not _await(stop, "the home, which the broker makes", opened.exists):
        return
    opened.record()
    with served(opened, name), Run(opened, alone=False) as run:
        if makes:
            opened.divide(settings.all_bridges())
        if name is Service.BROKER:
            _say(f"the broker listens on {run.use_broker(None, port, listen, known_as)}")
            job = None
        elif (job := _begin(run, name, address, stop)) is None:
            return
        _watch(run, job, stop)
        _say(f"the {name} stops")
        if name is Service.BRIDGE:
            stop_listening(run, ("bridge",), partial(_judges, opened), _JUDGED_S)


def _begin(run: "Run", name: Service, address: BrokerAddress | None, stop: Stop) -> "Job | None":
    """Start a part when what it needs is there; None where it was to stop before."""
    if address is not None:
        if Service.BROKER in services(run.home):
            raise FleetError(
                f'the broker of "{run.home.path}" runs already as a service; stop it, or leave --broker out',
                code="service-runs-already",
            )
        run.use_broker(address)
    elif name is Service.BRIDGE and not _await(stop, "the broker's address", run.home.run("broker").exists):
        return None
    return run.start(name)


def _await(stop: Stop, what: str, there: Callable[[], bool]) -> bool:
    """Wait until something is there; return False where we are to stop.

    Raises:
        FleetError: it is not there after two minutes.
    """
    limit, told = time.monotonic() + _PATIENCE_S, False
    while not there():
        if not told:
            _say(f"waiting for {what}")
            told = True
        if stop.wait(_WATCH_S):
            return False
        if time.monotonic() > limit:
            raise FleetError(
                f"{what} is not there after {_PATIENCE_S:.0f} s; start that part: ./fleet service broker", code="wait-timeout"
            )
    return True


def _judges(home: Home) -> bool:
    """Whether what the bridge wrote is judged by services that run."""
    return {Service.LANDING, Service.LIFECYCLE} <= {*services(home)} and get_desired(home).what == RUNNING


def _watch(run: "Run", job: "Job | None", stop: Stop) -> None:
    held = job is not None and job.held
    while not stop.wait(_WATCH_S):
        run.watch()
        if job is None:
            continue
        if job.verb == Service.BRIDGE:
            run.start_further_bridges(0)
        if job.held != held:
            held = job.held
            _say(f"the {job.name} job {'stops' if held else 'starts'}, as {get_desired(run.home).by} wants it")


def how_it_is(home: Home, name: Service) -> str:
    """Say how a service is.

    Raises:
        FleetError: it does not run, or is not well.
    """
    home.record()
    if name not in services(home):
        start = f"./fleet service {name} --home {home.path}"
        raise FleetError(f'the {name} of "{home.path}" does not run as a service; start it: {start}', code="service-not-running")
    if name is Service.BROKER:
        address = load_address(home.run("broker"))
        if not await_admission(address, 2.0):
            raise FleetError(
                f'the broker does not let us in on {address}; see "{home.logs / "broker.log"}"', code="broker-refuses"
            )
        return f"the broker lets clients in on {address}"
    wanted = get_desired(home)
    if name is Service.LIFECYCLE and wanted.what != RUNNING:
        return f"the lifecycle job is stopped, as {wanted.by} wants it"
    return _by_status(home, name)


def _by_status(home: Home, name: Service) -> str:
    status, silence_s = read_status(home.run(name)), silent_s(home.run(name), time.time())
    if not status or silence_s is None:
        raise FleetError(
            f"the {name} has not said yet how it is; if that stays so, see what it wrote", code="service-without-status"
        )
    state = str(status.get("state", "running"))
    begins = name is Service.LIFECYCLE and state == "starting"
    if silence_s > (_STARTING_S if begins else _SILENT_S):
        raise FleetError(f"the {name} ({state}) has said nothing for {silence_s:.0f} s; see what it wrote", code="service-silent")
    if problem := status.get("problem"):
        raise FleetError(f"the {name} ({state}): {problem}", code="service-unwell")
    return f"the {name}: {state}"


def _say(words: str) -> None:
    typer.echo(f"fleet: {words}", err=True)
