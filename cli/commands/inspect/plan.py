"""``fleet plan``: resources for a fleet, from costs of devices and messages."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cli.common.dry_run import DryRun, Read, print_dry_run, tables_read
from cli.common.options import DryOption, JsonOption
from cli.common.output import as_json, as_table, console
from fleetpulse.core.errors import Misuse
from fleetpulse.core.monitoring.health import measure
from fleetpulse.core.times import DAY_MS, format_duration, parse_duration_ms
from fleetpulse.io.home.home import Home
from fleetpulse.paths import cache_dir, home_folder
from fleetpulse.planning.model import CapacityPlan, Figures, Fleet, plan

MeasuredOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        help="Use the tables of this home for options not given, and show its present use.",
        callback=lambda path: path and home_folder(path),
    ),
]
_FOREVER: Final = "forever"
_MEANINGS: Final = {
    "messages_per_s": "messages per second",
    "key_groups": "key groups (change: fleet state rescale)",
    "devices_a_group": "devices per key group",
    "groups_a_core": "key groups per core of the job, or of its executors",
    "skew": "key groups of the busiest partition, relative to the mean",
    "partitions": "state partitions (initially one per core; change: fleet state repartition)",
    "cores": "cores of the lifecycle job",
    "executors": "executors, on a cluster",
    "ingest_cores": "cores of bridge and landing",
    "bridges": "bridges",
    "state_bytes": "state: newest version",
    "checkpoint_bytes": "checkpoint: all retained versions",
    "batch_s": "duration of a batch",
    "checkpoint_s": "checkpoint time per batch",
    "checkpoint_every": "batches per checkpoint, to stay within the tolerance",
    "memory_bytes": "memory of the lifecycle job",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(show_plan)


def show_plan(
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, max=100_000_000, help="Number of devices; 10000 by default.")
    ] = None,
    interval: Annotated[
        str | None, typer.Option("--interval", help="Time between two messages of a device; 60s by default.")
    ] = None,
    lateness: Annotated[str | None, typer.Option("--lateness", help="Allowed lateness; 60s by default.")] = None,
    errors: Annotated[
        float | None, typer.Option("--errors", min=0, max=1, help="Share of error messages; 0.01 by default.")
    ] = None,
    late: Annotated[float | None, typer.Option("--late", min=0, max=1, help="Share of late messages; 0.002 by default.")] = None,
    copies: Annotated[
        float | None, typer.Option("--copies", min=0, max=1, help="Share of duplicate messages; 0.01 by default.")
    ] = None,
    changes: Annotated[
        float | None, typer.Option("--changes", min=0, help="Mode changes per device and day; 0.2 by default.")
    ] = None,
    metrics: Annotated[
        float | None, typer.Option("--metrics", min=0, help="Bytes of metrics per message; 12 by default.")
    ] = None,
    keep: Annotated[str | None, typer.Option("--keep", help='Retention of messages, or "forever"; 90d by default.')] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", min=0.001, max=1, help="Share of a batch's time that its checkpoint may take; 0.1 by default."
        ),
    ] = None,
    cores: Annotated[
        int | None, typer.Option("--cores", min=1, max=1_024, help="Cores of the job; the fewest that suffice by default.")
    ] = None,
    home: MeasuredOption = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="First measure the costs on this machine, in about a minute.")
    ] = False,
    dry_run: DryOption = False,
    json_lines: JsonOption = False,
) -> None:
    """Estimate the resources that a fleet needs: cores, memory, state and storage.

    The estimate also covers key groups, partitions, and the duration of a batch. Storage is the
    amount in use after one month of operation. With --cores, key groups and partitions keep that
    many cores busy.
    """
    options: dict[str, Any] = {
        "devices": devices,
        "interval_ms": _duration("--interval", interval),
        "lateness_ms": _duration("--lateness", lateness),
        "error_share": errors,
        "late_share": late,
        "copy_share": copies,
        "changes_a_day": changes,
        "metrics_bytes": metrics,
        "tolerance": tolerance,
    }
    kept_ms = None if keep in (None, _FOREVER) else _duration("--keep", keep)
    if dry_run:
        named = {**options, "cores": cores}
        print_dry_run(_describe_dry_run(named, None if home is None else Home(home), measures=calibrate), json_lines=json_lines)
        return
    figures = _figures(measure_anew=calibrate)
    fleet = Fleet(10_000)
    if home is not None:
        fleet, heap_bytes = _of_home(Home(home))
        figures = replace(figures, heap_bytes=heap_bytes)
    fleet = replace(fleet, **{name: value for name, value in options.items() if value is not None})
    if keep is not None:
        fleet = replace(fleet, keep_days=None if kept_ms is None else kept_ms / DAY_MS)
    _show(plan(fleet, figures, cores=cores), fleet, figures, _present_usage(home), json_lines=json_lines)


def _describe_dry_run(options: dict[str, Any], home: Home | None, *, measures: bool) -> DryRun:
    """Describe a plan's inputs and outputs.

    Raises:
        FleetError: the home does not exist, its settings are invalid, or the saved cost figures
            are unreadable.
    """
    from batch.calibrate import FILE, load
    from fleetpulse.core.tables import JUDGEMENTS, MESSAGES, QUARANTINE, STREAM_HEALTH
    from fleetpulse.settings import load_settings

    figures_path = cache_dir() / FILE
    reads = [] if measures else [Read(f"the cost figures: {load(cache_dir()).source}")]
    if home is not None:
        home.record()
        load_settings(home.path)
        read = ((MESSAGES, "received_at"), (JUDGEMENTS, "event_time"), (QUARANTINE, "received_at"), (STREAM_HEALTH, "began_at"))
        reads += [*tables_read(home, read), Read(f'the sizes of the files below "{home.path}"')]
    named = [_option(name) for name, value in options.items() if value is not None]
    source = "the built-in fleet" if home is None else f'the fleet of "{home.path}"'
    before = "measure the costs on this machine, in about a minute, and " if measures else ""
    does = f"{before}plan for {source}" + (f", with options: {', '.join(named)}" if named else "")
    return DryRun(does, tuple(reads), (f'"{figures_path}"',) if measures else ())


def _option(name: str) -> str:
    return name.removesuffix("_ms").removesuffix("_bytes").removesuffix("_share").replace("_", " ")


def _duration(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    found = parse_duration_ms(text)
    if not found:
        raise Misuse(f'{option} must be longer than 0s; got "{text}"; write it like "5m"', code="duration-not-positive")
    return found


def _figures(*, measure_anew: bool) -> Figures:
    from batch.calibrate import calibrate, load, save

    if not measure_anew:
        return load(cache_dir())
    with console().status("") as progress:
        figures = calibrate(lambda what: progress.update(f"measuring {what}"))
    save(figures, cache_dir())
    return figures


def _of_home(home: Home) -> tuple[Fleet, int]:
    """Return a home's fleet, and the size of its JVM heap in bytes, from its settings."""
    from fleetpulse.io.tables.adaptive_batching import hold_ms, verdict_delay_ms
    from fleetpulse.planning.observed import fleet_of
    from fleetpulse.settings import load_settings, size_mb

    home.record()  # raises if there is no fleet
    settings = load_settings(home.path)
    kept_ms = settings.keep_device_snapshots
    kept_days = None if kept_ms is None else kept_ms / DAY_MS
    measured = fleet_of(home, settings.keep_messages)
    held_ms = hold_ms(verdict_delay_ms(home.deployment().allowed_lateness_ms, settings.verdict_delay))
    fleet = replace(measured, keep_snapshot_days=kept_days, batch_every_ms=settings.batch_every, held_ms=held_ms)
    return fleet, size_mb(settings.heap) * 1_048_576


def _present_usage(home: Path | None) -> dict[str, Any]:
    if home is None:
        return {}
    from fleetpulse.planning.observed import measured_use
    from fleetpulse.settings import load_settings

    found, cores = measured_use(Home(home)), load_settings(home).task_cores
    return {**found, "cores": cores, "groups_a_core": found["key_groups"] / cores}


def _show(found: CapacityPlan, fleet: Fleet, figures: Figures, now: dict[str, Any], *, json_lines: bool) -> None:
    if json_lines:
        fleet_values = {name: getattr(fleet, name) for name in Fleet.__slots__}
        as_json([{"fleet": fleet_values, "plan": found.as_rows(), "figures": figures.source, "now": now or None}])
        return
    planned, shown = found.as_rows(), console()
    retention = "without limit" if fleet.keep_days is None else f"for {fleet.keep_days:g} days"
    shown.print(
        f"{fleet.devices:,} devices, one message each per {format_duration(fleet.interval_ms)}, allowed lateness "
        f"{format_duration(fleet.lateness_ms)}; messages are kept {retention}; cost figures: {figures.source}"
    )
    rows = [{"what": meaning, "planned": _formatted(name, planned[name])} for name, meaning in _MEANINGS.items()]
    stored = [(f"stored after one month: {table}", table, size) for table, size in planned["storage_bytes"].items()]
    rows += [{"what": what, "planned": measure("_bytes", size)} for what, _, size in stored]
    columns = ["what", "planned"]
    if now:
        columns.append("now")
        measured = [_formatted(name, now.get(name)) for name in _MEANINGS]
        measured += [measure("_bytes", now["storage_bytes"].get(table)) for _, table, _ in stored]
        rows = [{**row, "now": value} for row, value in zip(rows, measured, strict=True)]
    shown.print(as_table(rows, columns, "plan"))


def _formatted(name: str, value: float | None) -> str | None:
    if value is None:
        return None
    if name.endswith("_bytes"):
        return measure(name, value)
    if name.endswith("_s") and name != "messages_per_s":
        return f"{value:.3g} s"
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.2g}"
