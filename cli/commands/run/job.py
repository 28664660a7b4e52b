"""``fleet job``: processes of a run, started by commands such as ``fleet up``."""

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, TextIO, cast

import typer

from cli.commands.run.serve import LOOPBACK, NICENESS
from cli.common.options import HomeOption
from cli.common.policy_files import load_mappings, require_no_spaces
from fleetpulse.core.messages.sparkplug import SUBSCRIPTIONS
from fleetpulse.core.rows import BRIDGE, EVERYONE, KAFKA, Kind
from fleetpulse.io.home.home import Home, bridge_job
from fleetpulse.io.mqtt.address import load_address
from fleetpulse.io.system.process import StopSignal, block_imports, tune_gc, unblock_imports, use_system_memory_pool

if TYPE_CHECKING:
    from streaming.bridge.bridge import MessageSource

jobs = typer.Typer(
    hidden=True, add_completion=False, pretty_exceptions_enable=False, help="Run one process of a run; started by other commands."
)
ParentOption = Annotated[int | None, typer.Option("--parent")]


def register(app: typer.Typer) -> None:
    """Add the jobs."""
    app.add_typer(jobs, name="job")


@jobs.callback()
def _import_without_extras() -> None:
    """Import Structlog and Paho without their optional packages.

    This saves 5 MB per process. Structlog formats exceptions with rich, but no job logs exceptions.
    Paho resolves SRV records with dns, but no job uses them.
    """
    block_imports("rich", "dns")
    import_module("structlog")
    unblock_imports("rich")  # typer prints usage errors with it


class _Log:
    """Standard output that drops lines while the disk is full, so that jobs survive."""

    def write(self, text: str) -> None:
        try:
            sys.stdout.write(text)
        except OSError:
            pass

    def flush(self) -> None:
        try:
            sys.stdout.flush()
        except OSError:
            pass


def _set_up_process(parent: int | None) -> StopSignal:
    import structlog

    factory = structlog.PrintLoggerFactory(cast("TextIO", _Log()))
    structlog.configure(logger_factory=factory, cache_logger_on_first_use=True)
    return StopSignal(parent).on_signals()


def _kafka(home: Home, options: Mapping[str, str]) -> "Callable[[], MessageSource]":
    from fleetpulse.io.kafka.config import parse_kafka
    from fleetpulse.io.kafka.subscriber import KafkaReceiver

    return partial(KafkaReceiver, parse_kafka(options), home.kafka_checkpoint, home.path / "spark" / KAFKA)


def prepare_quota(home: Home, name: str, max_new_devices: int) -> None:
    """Create the file of devices that a bridge knows if there is a quota; remove it if there is none."""
    from streaming.bridge.device_quota import FILE, write_known

    path = home.segments_of(name) / FILE
    if not max_new_devices:
        path.unlink(missing_ok=True)  # a later quota must not use it: it lacks the devices heard meanwhile
    elif not path.exists():
        from fleetpulse.reports.messages import known_hashes

        write_known(path, known_hashes(home))


@jobs.command("bridge")
def bridge(
    home: HomeOption,
    parent: ParentOption = None,
    replay: Annotated[bool, typer.Option("--replay")] = False,
    not_live: Annotated[bool, typer.Option("--not-live")] = False,
    name: Annotated[str, typer.Option("--name")] = BRIDGE,
) -> None:
    """Write messages from the broker to segments."""
    from fleetpulse.io.mqtt.embedded.broker import is_embedded
    from fleetpulse.settings import load_settings

    if name != KAFKA:  # PySpark may import pandas
        block_imports("pandas")
    from streaming.bridge.bridge import BridgeSettings, run_bridge

    at = Home(home)
    settings = load_settings(at.path)
    sites = settings.bridges.get(name, ())
    canary = f"fleet/{EVERYONE}/{name}/{Kind.TICK.value}"
    address, mappings = load_address(at.run("broker")), load_mappings(at)
    embedded = is_embedded(at.broker, address)
    if embedded and not sites:
        require_no_spaces(at.mapping, mappings)
    foreign = mappings.subscriptions() + (SUBSCRIPTIONS if settings.sparkplug_host else ())
    bridge_settings = BridgeSettings(
        at.segments_of(name),
        at.commands if name == BRIDGE else None,
        at.run(bridge_job(name)),
        address,
        at.session(name),
        at.session("replay"),
        name,
        replay=replay,
        live_after_replay=not not_live,
        embedded=embedded,
        subscriptions=(*(f"fleet/{site}/#" for site in sites), canary) if sites else ("fleet/#", *foreign),
        sparkplug_host="" if sites else settings.sparkplug_host,
        sites=sites,
        source_factory=_kafka(at, settings.kafka) if name == KAFKA else None,
        takes_foreign=bool(foreign),
        mappings=mappings,
        others={other: at.segments_of(other) for other in at.bridges() if other != name},
        canary_key=at.canary_key(),
        canary_interval_s=settings.canary_interval / 1000,
        reconnect_grace_s=settings.reconnect_grace / 1000,
        holds_back=at.deployment().verdict_jitter_ms > 0,
        flood_limit=settings.flood_limit,
        flood_bytes=settings.flood_bytes,
        max_new_devices=settings.max_new_devices,
        identity=at.identity(),
    )
    prepare_quota(at, name, settings.max_new_devices)
    use_system_memory_pool()
    tune_gc()
    run_bridge(bridge_settings, _set_up_process(parent))


@jobs.command("landing")
def landing(home: HomeOption, parent: ParentOption = None) -> None:
    """Load segments into bronze."""
    from fleetpulse.io.tables.adaptive_batching import landing_pause_s, verdict_delay_ms
    from fleetpulse.settings import load_settings

    block_imports("pandas")
    from streaming.landing.landing import POLL_S, run_landing

    at = Home(home)
    settings = load_settings(at.path)
    delay_ms = verdict_delay_ms(at.deployment().allowed_lateness_ms, settings.verdict_delay)
    use_system_memory_pool()
    tune_gc()
    mappings, pause_s = load_mappings(at), landing_pause_s(delay_ms, POLL_S)
    foreign = bool(mappings.rules or settings.sparkplug_host)
    stop, lease_ms = _set_up_process(parent), settings.bridge_lease
    run_landing(at, mappings, stop, lease_ms=lease_ms, live_pause_s=pause_s, takes_foreign=foreign)


@jobs.command("publisher")
def publisher(home: HomeOption, parent: ParentOption = None) -> None:
    """Publish the verdicts at the broker."""
    from fleetpulse.settings import load_settings

    block_imports("pandas")
    from streaming.publisher import run_publisher

    use_system_memory_pool()
    run_publisher(Home(home), load_settings(home).discovery_prefix, _set_up_process(parent))


@jobs.command("page")
def page(
    home: HomeOption,
    port: Annotated[int, typer.Option("--port")],
    parent: ParentOption = None,
    listen: Annotated[str, typer.Option("--listen")] = LOOPBACK,
    plain: Annotated[bool, typer.Option("--plain")] = False,
) -> None:
    """Serve the API, the metrics and the operations page, at low priority."""
    from fleetpulse.settings import load_settings

    block_imports("pandas")
    import structlog

    from fleetpulse.web.server import listener_of, run_server

    os.nice(NICENESS)
    use_system_memory_pool()
    at, stop = Home(home), _set_up_process(parent)
    listener = listener_of(at, load_settings(home), listen, port, plain=plain)
    run_server(at, listener, stop, "its page", lambda url: structlog.get_logger("page").info("serving", url=url))


@jobs.command("classes")
def classes(_home: HomeOption, parent: ParentOption = None) -> None:
    """Create Spark's class archive for faster starts, at low priority."""
    from cli.supervisor.cds import create_archive

    os.nice(10)
    typer.echo(create_archive(_set_up_process(parent)))


@jobs.command("lifecycle")
def lifecycle(home: HomeOption, parent: ParentOption = None) -> None:
    """Judge the rows of bronze, and write judgements."""
    from cli.common.session_size import session_resources_of
    from fleetpulse.io.tables.adaptive_batching import hold_ms, verdict_delay_ms
    from fleetpulse.settings import load_settings
    from streaming.lifecycle import LifecycleOptions, run_lifecycle

    settings, at = load_settings(home), Home(home)
    held_ms = hold_ms(verdict_delay_ms(at.deployment().allowed_lateness_ms, settings.verdict_delay))
    options = LifecycleOptions(
        held_ms, settings.batch_every, settings.keep_stream_health, settings.keep_judgement_versions, settings.stream_options()
    )
    run_lifecycle(at, _set_up_process(parent), options, session_resources_of(at))


@jobs.command("airflow")
def airflow(home: HomeOption, port: Annotated[int, typer.Option("--port")], parent: ParentOption = None) -> None:
    """Run Airflow."""
    from cli.supervisor.airflow import run_airflow

    run_airflow(Home(home), port, _set_up_process(parent))


@jobs.command("simulator")
def simulator(home: HomeOption, parent: ParentOption = None, history: Annotated[bool, typer.Option("--history")] = False) -> None:
    """Run a simulated fleet."""
    from streaming.simulator.simulator import run_simulator

    at = Home(home)
    run_simulator(at, load_address(at.run("broker")), _set_up_process(parent), play_history=history)
