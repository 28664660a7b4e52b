"""``fleet state``: inspect, copy, replace and roll back the lifecycle job's state."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.state import generations
from cli.commands.state.session import StateOptions, change_session, read_session, snapshot_gate
from cli.common.dry_run import DryRun, Read, print_dry_run
from cli.common.options import DEFAULT_HOME, DryOption, HomeOption, JsonOption
from cli.common.output import console, report_progress
from fleetpulse.columnar.codec.versions import STORED_FORM
from fleetpulse.core.errors import Misuse
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, MESSAGES
from fleetpulse.core.times import format_instant, parse_duration_ms, parse_instant_ms
from fleetpulse.io.checkpoints.checkpoint import position_after
from fleetpulse.io.home.checkpoint_ownership import require_own
from fleetpulse.io.home.exclusive import exclusive_state_change
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.wall_clock import wall_clock_ms

if TYPE_CHECKING:
    import pyarrow as pa

    from batch.state.operations import StateOperation
    from fleetpulse.io.checkpoints.generations import Generation

HoldOption = Annotated[bool, typer.Option("--hold", help="Make and check the generation; activate it later: state switch N.")]
GateOption = Annotated[bool, typer.Option("--gate", help="Require that it passes ./fleet quality gate.")]
BatchOption = Annotated[int | None, typer.Option("--at-batch", help="State after this batch; the newest by default.")]
OnceStoppedOption = Annotated[
    bool, typer.Option("--once-stopped", help="With --dry-run: plan as if the running job were stopped.")
]
VersionOption = Annotated[int | None, typer.Option("--version", help="Use the snapshot of this version.")]
AtOption = Annotated[str | None, typer.Option("--at", help="Use the newest snapshot at this instant.")]
_CANARY_RUNS = "5m"
state = typer.Typer(no_args_is_help=True, help="Inspect, snapshot, migrate and roll back the lifecycle job's state.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(state, name="state")
    generations.register(state)


@state.command("inspect")
def inspect(
    home: HomeOption = DEFAULT_HOME, at_batch: BatchOption = None, dry_run: DryOption = False, as_json: JsonOption = False
) -> None:
    """Show the contents of the checkpoint, and the effect of the next start."""
    from batch.state.inspect import inspect as look
    from cli.commands.state.inspect_view import show_inspected

    if dry_run:
        print_dry_run(_inspection(Home(home), at_batch), json_lines=as_json)
        return
    with read_session(home) as work:
        at = position_after(work.home.checkpoint, at_batch)  # raises its errors before Spark starts
        spark = work.spark
        work.report(f"reading generation {work.home.generation().number} after batch {at.batch}")
        found = look(spark, work.home, at.batch)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show_inspected(found)


def _inspection(home: Home, at_batch: int | None) -> DryRun:
    """Describe what an inspection would read.

    Raises:
        FleetError: the home does not exist, or its checkpoint belongs to another home, is damaged,
            or does not keep the batch.
    """
    from batch.state.inspect import checkpoint_facts

    home.record()
    require_own(home, home.generation().number)
    at = position_after(home.checkpoint, at_batch)
    found = checkpoint_facts(home, at, wall_clock_ms())
    number, groups = found["generation"]["number"], found["generation"]["key_groups"]
    does = f"show the state of generation {number} after batch {at.batch}: {groups} key groups in {at.partitions} partitions"
    of_state = Read(f'the state in "{home.checkpoint / "state"}"', found["files"]["count"], None, found["files"]["bytes"])
    logs = (Read(f"the Delta log of {table.name}") for table in (MESSAGES, DEVICE_SNAPSHOTS))
    writes = f'Spark\'s temporary folder in "{home.path / "spark"}", and its log "{home.logs / "batch.log"}"'
    return DryRun(does, (of_state, *logs), (writes,))


@state.command("snapshot")
def snapshot(
    home: HomeOption = DEFAULT_HOME,
    at_batch: BatchOption = None,
    gate: Annotated[bool, typer.Option("--gate", help="Publish it only if it passes ./fleet quality gate.")] = False,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the state after one batch to the table device_snapshots.

    The lifecycle job may keep running. If the newest snapshot already holds the same state, nothing
    is written.
    """
    from batch.state.snapshot import take
    from cli.supervisor.flush import flush_delayed_verdicts

    Home(home).record()
    if at_batch is None and not dry_run:
        flush_delayed_verdicts(Home(home))
    exclusive = nullcontext() if dry_run else exclusive_state_change(Home(home), "fleet state snapshot", report_progress)
    with exclusive, read_session(home, dry=dry_run) as work:
        gate_check = snapshot_gate(work) if gate and not dry_run else None
        found = asdict(take(work.spark, work.home, at_batch, work.report, gate_check, dry=dry_run))
    _shown(found, as_json=as_json)


@state.command("snapshots")
def list_snapshots(home: HomeOption = DEFAULT_HOME, dry_run: DryOption = False, as_json: JsonOption = False) -> None:
    """List the retained snapshots, newest first."""
    Home(home).record()
    if dry_run:
        print_dry_run(
            DryRun("list the retained snapshots", (Read(f"the Delta log of {DEVICE_SNAPSHOTS.name}"),)), json_lines=as_json
        )
        return
    from fleetpulse.io.tables.snapshots import is_known, snapshots

    found = [asdict(one) for one in snapshots(Home(home))]
    if as_json:
        for one in found:
            typer.echo(json.dumps(one))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for name in ("version", "written", "generation", "batch", "bronze", "judged up to", "devices", "key groups"):
        table.add_column(name)
    for one in found:
        if not is_known(one["form"]):
            more = f"stored form {one['form']}: of a newer version" if one["form"] else "of another version"
            table.add_row(str(one["version"]), format_instant(one["at_ms"]), more)
            continue
        instants = (one["at_ms"], one["frontier_ms"])
        written, frontier = ("-" if instant is None else format_instant(instant) for instant in instants)
        table.add_row(*map(str, (one["version"], written, one["generation"], one["batch"], one["bronze"], frontier,
                                 f"{one['devices']:,}", one["key_groups"])))  # fmt: skip
    console().print(table)


@state.command("bootstrap")
def bootstrap(
    home: HomeOption = DEFAULT_HOME,
    version: VersionOption = None,
    at: AtOption = None,
    only: Annotated[str | None, typer.Option("--only", help="Keep only devices that this filter selects: site = 'north'")] = None,
    devices: Annotated[Path | None, typer.Option("--devices", help="Use a CSV or Parquet file of devices instead.")] = None,
    registry: Annotated[bool, typer.Option("--registry", help="Use the registered devices instead.")] = False,
    damaged: Annotated[bool, typer.Option("--damaged", help="The current state is unreadable: skip the comparison.")] = False,
    drops_at_most: Annotated[
        int | None, typer.Option("--drops-at-most", min=0, help="With a snapshot: refuse to drop more devices than this.")
    ] = None,
    gate: GateOption = False,
    hold: HoldOption = False,
    dry_run: DryOption = False,
    once_stopped: OnceStoppedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a new generation from a snapshot, the registry, or a list of devices.

    The default is the newest snapshot. The lifecycle job must be stopped: ./fleet stream stop.
    """
    if sum((version is not None or at is not None or only is not None, devices is not None, registry)) > 1:
        raise Misuse(
            "bootstrap takes one source: a snapshot (--version, --at, --only), --devices, or --registry; name one",
            code="option-conflict",
        )
    if version is not None and at is not None:
        raise Misuse("--version and --at both select a snapshot; give one of them", code="option-conflict")
    options = StateOptions(dry_run, hold, as_json, once_stopped, gate, damaged)
    if damaged and (devices is not None or registry):
        raise Misuse(
            "--devices and --registry take pending rows, gaps and policies from the current state, which --damaged marks as "
            "unreadable; first recover from a snapshot (--damaged alone), then bootstrap from the devices",
            code="option-conflict",
        )
    if drops_at_most is not None and (devices is not None or registry):
        raise Misuse(
            "--drops-at-most limits the devices that a bootstrap from a snapshot drops; omit it with --devices and --registry",
            code="option-conflict",
        )
    if devices is not None or registry:
        from cli.commands.state.device_lists import read_devices, registered_devices

        found = None if registry else read_devices(devices)

        def listed(frontier_ms: int | None) -> "pa.Table":
            return registered_devices(Home(home), frontier_ms) if found is None else found

        named = "the registry" if registry else str(devices)

        def from_list(work: "StateOperation") -> "Generation | None":
            from batch.state.operations import bootstrap_devices

            return bootstrap_devices(work, listed, named)

        _run_change("bootstrap", home, options, from_list)
        return
    moment = None if at is None else parse_instant_ms(at)
    from fleetpulse.core.operations.device_filter import parse_device_filter
    from fleetpulse.io.tables.snapshots import find_snapshot

    selected = None if only is None else parse_device_filter(only)
    chosen = find_snapshot(Home(home), version, moment)

    def from_snapshot(work: "StateOperation") -> "Generation | None":
        from batch.state.operations import bootstrap as begin

        return begin(work, chosen, selected, damaged=damaged, drops_at_most=drops_at_most)

    _run_change("bootstrap", home, options, from_snapshot)


def _run_change(name: str, home: Path, options: StateOptions, act: "Callable[[StateOperation], Generation | None]") -> None:
    with change_session(home, name, options) as work:
        generation = act(work)
    if options.as_json and generation is not None:
        typer.echo(json.dumps({"generation": generation.number, **asdict(generation)}))


@state.command("migrate")
def migrate(
    home: HomeOption = DEFAULT_HOME,
    form: Annotated[int, typer.Option("--form", help="Format version to write; the newest by default.")] = STORED_FORM,
    canary: Annotated[bool, typer.Option("--canary", help="First run beside the job; activate only if both agree.")] = False,
    for_: Annotated[str | None, typer.Option("--for", help="With --canary: duration of the trial; 5m by default.")] = None,
    gate: GateOption = False,
    hold: HoldOption = False,
    dry_run: DryOption = False,
    once_stopped: OnceStoppedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a new generation that writes another stored form.

    The lifecycle job must be stopped (./fleet stream stop), except with --canary.
    """

    def act(work: "StateOperation") -> "Generation | None":
        from batch.state.operations import migrate as verb

        return verb(work, form)

    if canary and (hold or gate):
        raise Misuse(
            "--canary activates the new generation if both agree; omit --hold and --gate, or omit --canary",
            code="option-conflict",
        )
    if for_ is not None and not canary:
        raise Misuse("--for is the duration of a canary; add --canary, or omit --for", code="option-conflict")
    for_s = parse_duration_ms(for_ or _CANARY_RUNS) / 1000
    if canary and as_json:
        raise Misuse("--canary has no JSON output; omit --json", code="option-conflict")
    if canary and once_stopped:
        raise Misuse("a canary runs beside the running job; omit --once-stopped", code="option-conflict")
    if canary:
        from cli.commands.state.canary import run_canary_beside_job

        with read_session(home, dry=dry_run) as work:
            run_canary_beside_job(work, "migrate", form, for_s)
        return
    _run_change("migrate", home, StateOptions(dry_run, hold, as_json, once_stopped, gate), act)


@state.command("repartition")
def repartition(
    partitions: Annotated[int, typer.Argument(help="Number of partitions.")],
    home: HomeOption = DEFAULT_HOME,
    anew: Annotated[
        bool, typer.Option("--anew", help="Rebuild from the rows of the state, without Spark's repartitioning.")
    ] = False,
    gate: GateOption = False,
    hold: HoldOption = False,
    dry_run: DryOption = False,
    once_stopped: OnceStoppedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a new generation with another number of state partitions.

    The lifecycle job must be stopped: ./fleet stream stop.
    """

    def act(work: "StateOperation") -> "Generation | None":
        from batch.state.operations import repartition as verb
        from batch.state.operations import repartition_anew

        return (repartition_anew if anew else verb)(work, partitions)

    _run_change("repartition", home, StateOptions(dry_run, hold, as_json, once_stopped, gate), act)


@state.command("rescale")
def rescale(
    key_groups: Annotated[int, typer.Option("--key-groups", help="Number of key groups.")],
    home: HomeOption = DEFAULT_HOME,
    gate: GateOption = False,
    hold: HoldOption = False,
    dry_run: DryOption = False,
    once_stopped: OnceStoppedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a new generation with another number of key groups.

    The lifecycle job must be stopped: ./fleet stream stop.
    """

    def act(work: "StateOperation") -> "Generation | None":
        from batch.state.operations import rescale as verb

        return verb(work, key_groups)

    _run_change("rescale", home, StateOptions(dry_run, hold, as_json, once_stopped, gate), act)


@state.command("rollback")
def rollback(
    home: HomeOption = DEFAULT_HOME,
    to: Annotated[int | None, typer.Option("--to", help="Generation to restore; the previous one by default.")] = None,
    hold: HoldOption = False,
    dry_run: DryOption = False,
    once_stopped: OnceStoppedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a new generation from the state of an earlier one.

    Rows received since then are judged again; judgements already emitted are not emitted again. The
    lifecycle job must be stopped: ./fleet stream stop.
    """

    def act(work: "StateOperation") -> "Generation | None":
        from batch.state.operations import rollback as verb

        return verb(work, to)

    _run_change("rollback", home, StateOptions(dry_run, hold, as_json, once_stopped), act)


def _shown(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found))
        return
    from rich.console import Console

    for name, value in found.items():
        shown = format_instant(value) if name.endswith("_ms") and value is not None else value
        Console().print(f"{name.removesuffix('_ms'):12} {shown}", highlight=False)
