"""``fleet state``: look into the lifecycle job's state, copy it, change its shape, and go back."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.commands.state import generations
from cli.commands.state.session import StateOptions, changing, looking, snapshot_gate
from cli.common.dry_run import DryRun, Read, print_dry_run
from cli.common.options import DEFAULT_HOME, DryOption, HomeOption, JsonOption
from cli.common.output import console, say
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

HoldOption = Annotated[bool, typer.Option("--hold", help="Make it, check it, and wait for: state switch N.")]
GateOption = Annotated[bool, typer.Option("--gate", help="Only if what is made passes ./fleet quality gate.")]
BatchOption = Annotated[int | None, typer.Option("--at-batch", help="After this batch; the newest by default.")]
OnceStoppedOption = Annotated[
    bool, typer.Option("--once-stopped", help="With --dry-run: what would be done once the job is stopped, though it runs now.")
]
VersionOption = Annotated[int | None, typer.Option("--version", help="The snapshot of this version.")]
AtOption = Annotated[str | None, typer.Option("--at", help="The newest snapshot of this instant.")]
_CANARY_RUNS = "5m"
state = typer.Typer(no_args_is_help=True, help="The state: look into it, copy it, change its shape, go back.")


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.add_typer(state, name="state")
    generations.register(state)


@state.command("inspect")
def inspect(
    home: HomeOption = DEFAULT_HOME, at_batch: BatchOption = None, dry_run: DryOption = False, as_json: JsonOption = False
) -> None:
    """Show what the checkpoint holds, and what the next start would do."""
    from batch.state.inspect import inspect as look
    from cli.commands.state.inspect_view import show_inspected

    if dry_run:
        print_dry_run(_inspection(Home(home), at_batch), json_lines=as_json)
        return
    with looking(home) as work:
        at = position_after(work.home.checkpoint, at_batch)  # what is refused, is before Spark has started
        spark = work.spark
        work.say(f"reading generation {work.home.generation().number} after batch {at.batch}")
        found = look(spark, work.home, at.batch)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show_inspected(found)


def _inspection(home: Home, at_batch: int | None) -> DryRun:
    """Return what an inspection would read.

    Raises:
        FleetError: there is no home, or its checkpoint is another's, is damaged, or has no such batch.
    """
    from batch.state.inspect import of_files

    home.record()
    require_own(home, home.generation().number)
    at = position_after(home.checkpoint, at_batch)
    found = of_files(home, at, wall_clock_ms())
    number, groups = found["generation"]["number"], found["generation"]["key_groups"]
    does = f"show the state of generation {number} after batch {at.batch}: {groups} key groups in {at.partitions} partitions"
    of_state = Read(f'the state in "{home.checkpoint / "state"}"', found["files"]["count"], None, found["files"]["bytes"])
    logs = (Read(f"the log of {table.name}") for table in (MESSAGES, DEVICE_SNAPSHOTS))
    writes = f'a folder of Spark\'s in "{home.path / "spark"}", removed at the end, and its log "{home.logs / "batch.log"}"'
    return DryRun(does, (of_state, *logs), (writes,))


@state.command("snapshot")
def snapshot(
    home: HomeOption = DEFAULT_HOME,
    at_batch: BatchOption = None,
    gate: Annotated[bool, typer.Option("--gate", help="Only if it passes ./fleet quality gate.")] = False,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy the state at one batch to the table device_snapshots; beside a running job as well. No effect where it is there."""
    from batch.state.snapshot import take
    from cli.supervisor.flush import say_held_back

    Home(home).record()
    if at_batch is None and not dry_run:
        say_held_back(Home(home))
    kept_still = nullcontext() if dry_run else exclusive_state_change(Home(home), "fleet state snapshot", say)
    with kept_still, looking(home, dry=dry_run) as work:
        looks = snapshot_gate(work) if gate and not dry_run else None
        found = asdict(take(work.spark, work.home, at_batch, work.say, looks, dry=dry_run))
    _shown(found, as_json=as_json)


@state.command("snapshots")
def list_snapshots(home: HomeOption = DEFAULT_HOME, dry_run: DryOption = False, as_json: JsonOption = False) -> None:
    """List the snapshots that are kept, the newest first."""
    Home(home).record()
    if dry_run:
        print_dry_run(
            DryRun("list the snapshots that are kept", (Read(f"the log of {DEVICE_SNAPSHOTS.name}"),)), json_lines=as_json
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
            more = f"form {one['form']}: of a newer version" if one["form"] else "not of this version"
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
    only: Annotated[str | None, typer.Option("--only", help="An SQL condition on a device, such as: site = 'north'")] = None,
    devices: Annotated[Path | None, typer.Option("--devices", help="A CSV or Parquet file of devices instead.")] = None,
    registry: Annotated[bool, typer.Option("--registry", help="The registered devices instead.")] = False,
    damaged: Annotated[bool, typer.Option("--damaged", help="The present state cannot be read: nothing is compared.")] = False,
    gate: GateOption = False,
    hold: HoldOption = False,
    dry_run: DryOption = False,
    once_stopped: OnceStoppedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on from a snapshot, from the registry, or from a list of devices, in a new generation."""
    if sum((version is not None or at is not None or only is not None, devices is not None, registry)) > 1:
        raise Misuse(
            "a bootstrap is from a snapshot (--version, --at, --only), from --devices, or from --registry: name one",
            code="option-conflict",
        )
    if version is not None and at is not None:
        raise Misuse("a snapshot is named by its --version, or by an instant with --at: give one of them", code="option-conflict")
    asked = StateOptions(dry_run, hold, as_json, once_stopped, gate, damaged)
    if damaged and (devices is not None or registry):
        raise Misuse(
            "with --devices and --registry what waits, gaps and policies are taken from the present state, which --damaged says "
            "cannot be read: begin anew from a snapshot (--damaged alone), and give the devices then",
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

        _changing("bootstrap", home, asked, from_list)
        return
    moment = None if at is None else parse_instant_ms(at)
    from fleetpulse.io.tables.snapshots import find_snapshot

    chosen = find_snapshot(Home(home), version, moment)

    def from_snapshot(work: "StateOperation") -> "Generation | None":
        from batch.state.operations import bootstrap as begin

        return begin(work, chosen, only, damaged=damaged)

    _changing("bootstrap", home, asked, from_snapshot)


def _changing(name: str, home: Path, asked: StateOptions, act: "Callable[[StateOperation], Generation | None]") -> None:
    with changing(home, name, asked) as work:
        made = act(work)
    if asked.as_json and made is not None:
        typer.echo(json.dumps({"generation": made.number, **asdict(made)}))


@state.command("migrate")
def migrate(
    home: HomeOption = DEFAULT_HOME,
    form: Annotated[int, typer.Option("--form", help="The stored form to go on in.")] = STORED_FORM,
    canary: Annotated[bool, typer.Option("--canary", help="Beside the running job first; only if both say the same.")] = False,
    for_: Annotated[str | None, typer.Option("--for", help="How long both run, with --canary; 5m by default.")] = None,
    gate: GateOption = False,
    hold: HoldOption = False,
    dry_run: DryOption = False,
    once_stopped: OnceStoppedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on in another stored form, in a new generation."""

    def act(work: "StateOperation") -> "Generation | None":
        from batch.state.operations import migrate as verb

        return verb(work, form)

    if canary and (hold or gate):
        raise Misuse(
            "a canary switches where both say the same: leave --hold and --gate, or make it without a canary",
            code="option-conflict",
        )
    if for_ is not None and not canary:
        raise Misuse(
            "--for says how long a canary runs beside the job: give --canary with it, or leave it", code="option-conflict"
        )
    for_s = parse_duration_ms(for_ or _CANARY_RUNS) / 1000
    if canary and as_json:
        raise Misuse("a canary says what both sides said, to people: leave --json", code="option-conflict")
    if canary and once_stopped:
        raise Misuse("a canary runs beside the running job: leave --once-stopped", code="option-conflict")
    if canary:
        from cli.commands.state.canary import beside

        with looking(home, dry=dry_run) as work:
            beside(work, "migrate", form, for_s)
        return
    _changing("migrate", home, StateOptions(dry_run, hold, as_json, once_stopped, gate), act)


@state.command("repartition")
def repartition(
    partitions: Annotated[int, typer.Argument(help="How many partitions the state is to have.")],
    home: HomeOption = DEFAULT_HOME,
    anew: Annotated[bool, typer.Option("--anew", help="From the state's rows, and not by Spark's own repartitioning.")] = False,
    gate: GateOption = False,
    hold: HoldOption = False,
    dry_run: DryOption = False,
    once_stopped: OnceStoppedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on with another number of partitions."""

    def act(work: "StateOperation") -> "Generation | None":
        from batch.state.operations import repartition as verb
        from batch.state.operations import repartition_anew

        return (repartition_anew if anew else verb)(work, partitions)

    _changing("repartition", home, StateOptions(dry_run, hold, as_json, once_stopped, gate), act)


@state.command("rescale")
def rescale(
    key_groups: Annotated[int, typer.Option("--key-groups", help="How many key groups there are to be.")],
    home: HomeOption = DEFAULT_HOME,
    gate: GateOption = False,
    hold: HoldOption = False,
    dry_run: DryOption = False,
    once_stopped: OnceStoppedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on with another number of key groups, in a new generation."""

    def act(work: "StateOperation") -> "Generation | None":
        from batch.state.operations import rescale as verb

        return verb(work, key_groups)

    _changing("rescale", home, StateOptions(dry_run, hold, as_json, once_stopped, gate), act)


@state.command("rollback")
def rollback(
    home: HomeOption = DEFAULT_HOME,
    to: Annotated[int | None, typer.Option("--to", help="The generation to go back to; the one before by default.")] = None,
    hold: HoldOption = False,
    dry_run: DryOption = False,
    once_stopped: OnceStoppedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go back to what an earlier generation was; what was judged since is judged again, and not said again."""

    def act(work: "StateOperation") -> "Generation | None":
        from batch.state.operations import rollback as verb

        return verb(work, to)

    _changing("rollback", home, StateOptions(dry_run, hold, as_json, once_stopped), act)


def _shown(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found))
        return
    from rich.console import Console

    for name, value in found.items():
        shown = format_instant(value) if name.endswith("_ms") and value is not None else value
        Console().print(f"{name.removesuffix('_ms'):12} {shown}", highlight=False)
