"""``fleet state generations``, ``switch``, ``discard`` and ``prune``."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer

from cli.common.dry_run import DryRun, Read, print_dry_run
from cli.common.options import DEFAULT_HOME, DryOption, HomeOption, JsonOption
from cli.common.output import as_markup, console, report_progress
from fleetpulse.core.times import format_instant
from fleetpulse.io.checkpoints.generations import load_generations
from fleetpulse.io.home.exclusive import exclusive_state_change
from fleetpulse.io.home.home import Home

NumberArgument = Annotated[int, typer.Argument(help="Number of the held generation.")]


def register(state: typer.Typer) -> None:
    """Add the commands."""
    state.command("generations")(list_generations)
    state.command("switch")(switch)
    state.command("discard")(discard)
    state.command("prune")(prune)


def switch(number: NumberArgument, home: HomeOption = DEFAULT_HOME, dry_run: DryOption = False) -> None:
    """Activate a held generation: one that was made with --hold.

    This is refused if the current generation has judged more rows since the held one was made.
    """
    from batch.state.handoff import switch as give

    opened = Home(home)
    opened.record()
    with exclusive_state_change(opened, "fleet state switch", report_progress), opened.state_held("fleet state switch"):
        give(opened, number, report_progress, dry=dry_run)


def discard(number: NumberArgument, home: HomeOption = DEFAULT_HOME, dry_run: DryOption = False) -> None:
    """Remove a held generation: one that was made with --hold.

    The current generation is not changed; the lifecycle job may keep running.
    """
    from batch.state.handoff import discard as remove

    opened = Home(home)
    opened.record()
    with nullcontext() if dry_run else exclusive_state_change(opened, "fleet state discard", report_progress):
        remove(opened, number, report_progress, dry=dry_run)


def list_generations(home: HomeOption = DEFAULT_HOME, dry_run: DryOption = False, as_json: JsonOption = False) -> None:
    """List the generations, with their status, their source and who asked for them."""
    opened = Home(home)
    opened.record()
    if dry_run:
        print_dry_run(DryRun("list the generations", (Read(f'their record in "{opened.lifecycle}"'),)), json_lines=as_json)
        return
    record = load_generations(opened.lifecycle)
    found = [record.known[number] for number in sorted(record.known)] or [opened.generation()]
    if as_json:
        for one in found:
            typer.echo(json.dumps(asdict(one)))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for name in ("generation", "status", "made", "by", "asked by", "from", "key groups", "form", "stopped after batch"):
        table.add_column(name)
    for one in found:
        made_at = format_instant(one.made_at_ms) if one.made_at_ms else "-"
        source = ", ".join(f"{name} {value}" for name, value in one.made_from.items() if value is not None) or "-"
        asked_by = as_markup(one.asked_by or "-")
        table.add_row(str(one.number), one.status, made_at, one.made_by, asked_by, source, str(one.key_groups),
                      str(one.form), str(one.position.get("batch", "-")))  # fmt: skip
    console().print(table)


def prune(
    home: HomeOption = DEFAULT_HOME,
    keep: Annotated[int, typer.Option("--keep", min=0, help="Number of retired generations to keep.")] = 1,
    dry_run: DryOption = False,
) -> None:
    """Remove the checkpoints of retired generations.

    The current generation is not changed; the lifecycle job may keep running.
    """
    from batch.state.prune import prune as remove

    opened = Home(home)
    opened.record()
    with nullcontext() if dry_run else exclusive_state_change(opened, "fleet state prune", report_progress):
        remove(opened, keep, report_progress, dry=dry_run)
