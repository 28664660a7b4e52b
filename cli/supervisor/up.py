"""``fleet up``: start the processes of a home, show their state, and stop them in order."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.live import Live

from cli.supervisor.flush import stop_listening
from cli.supervisor.processes import Run, require_space
from cli.supervisor.screen import Screen
from cli.supervisor.sidecars import (
    AirflowSidecar,
    ClassArchiveSidecar,
    PageSidecar,
    PublisherSidecar,
    airflow_port,
    page_listener,
)
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import Policy
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import EVERYONE
from fleetpulse.io.home.command_spool import spool
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.segments import bridge_position
from fleetpulse.io.kafka.config import parse_kafka
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.system.process import StopSignal
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.planning.model import first_key_groups
from fleetpulse.settings import Settings, load_settings
from streaming.simulator.simulator import SimulatedFleet, load_fleet

_DEVICES, _SEED = 100, 1  # defaults of the simulated fleet
WATCH_S = 0.5  # interval of checks of the processes
_DRAW_S: Final = 2.0  # interval of drawings of the screen: each takes 10 ms
_PATIENCE_S = 200.0  # less than the timeout of "fleet down"; the lifecycle job may still be starting on a busy machine


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of ``fleet up``.

    Attributes:
        devices: size of the simulated fleet; None for the size in the home, or 100 in a new home.
        seed: seed of the simulated fleet; None for the seed in the home, or 1 in a new home.
        for_s: duration of the run in seconds; None for a run until it is stopped.
        simulate: whether to simulate a fleet.
        broker: address of another broker; None for the embedded one.
        port: port of the embedded broker.
        policy: requested policy; None for the simulated fleet's, or the built-in one.
        airflow_port: port of Airflow's UI; 0 for a free one, None for a run without Airflow.
        picture: SVG file for the last screen; None for no file.
        page_port: port of the HTTP server; 0 for a free one, None for a run without it.
    """

    devices: int | None
    seed: int | None
    for_s: float | None
    simulate: bool
    broker: BrokerAddress | None
    port: int
    policy: Policy | None
    airflow_port: int | None = None
    picture: Path | None = None
    page_port: int | None = None


def up(home: Home, options: UpOptions, deployment: Deployment | None) -> None:
    """Run a home until Ctrl-C, SIGTERM or the end of ``for_s``.

    The order of starts is: broker, lifecycle job, landing, bridge, simulator. Further bridges start
    once the first one is live, and Airflow after the first verdict. The HTTP server starts last of all, at
    low priority. `Run` stops all of them in the
    reverse order.

    Raises:
        FleetError: a port or the home is in use, the disk is full, or a process ended too often.
    """
    settings = load_settings(home.path)
    home.prepare(deployment, settings.chosen_identity(), first_key_groups(settings.task_cores), settings.files())
    if settings.kafka:
        parse_kafka(settings.kafka)  # reports faults of the setting here, not in a log
    require_space(home.path)
    with home.locked("fleet up"):
        stop = StopSignal().on_signals()
        home.divide(settings.all_bridges())
        with Run(home) as run:
            history = _prepare(home, options)
            airflow = None if options.airflow_port is None else AirflowSidecar(run, airflow_port(options.airflow_port))
            page = None if options.page_port is None else PageSidecar(run, page_listener(home, settings, options.page_port))
            address = run.use_broker(options.broker, options.port)
            restarts = settings.restarts
            run.start("lifecycle", restarts=restarts)
            run.start("landing", restarts=restarts)
            run.start("bridge", ["--replay"] if history else [], restarts=restarts)
            if options.simulate:
                run.start("simulator", ["--history"] if history else [], restarts=restarts)
            if page:
                page.start()
            _watch(run, options, address, stop, settings, airflow, page)
            typer.echo("stopping: writing received messages and finishing the current batch", err=True)
            if home.deployment().verdict_jitter_ms:
                stop_listening(run, ("simulator", "bridge"), lambda: run.alive("landing") and run.alive("lifecycle"), _PATIENCE_S)
        Console(stderr=True).print(f'stopped; the next "./fleet up --home {home.path}" resumes from here')


def _prepare(home: Home, options: UpOptions) -> bool:
    """Store the simulated fleet or the policy.

    Returns:
        Whether the history of the simulated fleet, or a part of it, is still to be played.
    """
    position = bridge_position(home.segments)
    known = load_fleet(home)
    if options.simulate and known is not None:
        _require_same(home, options, known)
    if options.simulate and known is None:
        seed = _SEED if options.seed is None else options.seed
        known = SimulatedFleet.begin(seed, options.devices or _DEVICES, wall_clock_ms(), options.policy)
        known.remember(home)
    elif options.policy is not None:
        content = {"policy": options.policy.normalised()}
        spool(home, [(f"fleet/{EVERYONE}/{EVERYONE}/policy", content)])
    if not options.simulate or known is None:
        return False
    unfinished = position is not None and position.recording == known.recording and not position.ended
    return position is None or unfinished


def _require_same(home: Home, options: UpOptions, known: SimulatedFleet) -> None:
    """Refuse options that differ from the simulated fleet of the home."""
    existing, requested = (known.scenario.devices, known.scenario.seed), (options.devices, options.seed)
    if any(one is not None and one != other for one, other in zip(requested, existing, strict=True)):
        got = " ".join(f"--{name} {one}" for name, one in zip(("devices", "seed"), requested, strict=True) if one is not None)
        raise FleetError(
            f'the simulated fleet of the home "{home.path}" has {existing[0]} devices and the seed {existing[1]}; got '
            f"{got}; omit these options to resume it, or pass another --home",
            code="simulated-fleet-differs",
        )


def _watch(
    run: Run,
    options: UpOptions,
    address: BrokerAddress,
    stop: StopSignal,
    settings: Settings,
    airflow: AirflowSidecar | None,
    page: PageSidecar | None,
) -> None:
    console = Console()
    screen, classes, publisher = Screen(run, address), ClassArchiveSidecar(run), PublisherSidecar(run, settings)
    limit = time.monotonic() + options.for_s if options.for_s else None
    if not options.simulate and options.broker is None:
        for line in _access_examples(run.home, address):
            typer.echo(line)
    for line in [*(page.invitation() if page else ()), *(airflow.invitation() if airflow else ())]:
        typer.echo(line)

    def continue_run() -> bool:
        if stop.wait(WATCH_S) or (limit is not None and time.monotonic() >= limit):
            return False
        run.supervised("lifecycle", by_other=airflow is not None and airflow.supervises())
        run.watch()
        run.start_further_bridges(settings.restarts)
        if screen.first_verdict_s is not None:
            classes.start()
            publisher.start()
            if airflow:
                airflow.start()
        return True

    if console.is_terminal:
        with Live(screen.render(), console=console, auto_refresh=False) as live:
            drawn_s = time.monotonic()
            while continue_run():
                if time.monotonic() - drawn_s >= _DRAW_S:
                    live.update(screen.render(), refresh=True)
                    drawn_s = time.monotonic()
    else:
        _print_lines(screen, continue_run, console)
    if options.picture:
        _draw(options.picture, screen)


def _draw(path: Path, screen: Screen) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line.rstrip() for line in screen.picture().splitlines()) + "\n")
    except OSError as error:
        raise FleetError(
            f'the picture "{path}" cannot be written ({error.strerror}); choose another file', code="file-unwritable"
        ) from None


def _print_lines(screen: Screen, continue_run: Callable[[], bool], console: Console) -> None:
    """Print the figures as a line when they change, at most every five seconds."""
    last_line, next_at = "", 0.0
    while continue_run():
        line = screen.line()
        if line != last_line and time.monotonic() >= next_at:
            console.print(line, highlight=False, soft_wrap=True)
            last_line, next_at = line, time.monotonic() + 5


def _access_examples(home: Home, address: BrokerAddress) -> list[str]:
    """Return example commands: grant a device access, publish for it, watch it.

    They do not show the fleet's own password, which has all permissions.
    """
    where = f"-h {address.host} -p {address.port}"
    device = "main/my-device" if home.identity() is DeviceIdentity.SITE_AND_ID else "my-device"
    if address.tls is not None:
        where += f" --cafile {address.tls.ca}" if address.tls.ca else " --tls-use-os-certs"
    return [
        f"broker: {address.host}:{address.port}",
        f"grant:  PASSWORD=$(./fleet access grant {device} --home {home.path})",
        f'try:    mosquitto_pub {where} -u {device} -P "$PASSWORD" -q 1 -t fleet/main/my-device/heartbeat '
        "-m '{\"ts\": '$(date +%s)000'}'",
        f"then:   ./fleet listen --home {home.path}    and    ./fleet device {device} --home {home.path}",
    ]
