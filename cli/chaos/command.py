"""The verb ``chaos``: its options, and the output of its results."""

from random import SystemRandom
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from cli.chaos.targets import OF_CLUSTER, KillKind
from cli.common.output import as_json, as_table, console
from fleetpulse.core.errors import FleetError, Misuse

COLUMNS: Final = (
    "kill",
    "kills",
    "acknowledged",
    "lost",
    "judged_twice",
    "differences",
    "false_offline",
    "recovery_s",
    "longest_s",
)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("chaos")(chaos)


def chaos(
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Number of rounds: one kill of every kind, in random order.")
    ] = 20,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of order, instants and load; random by default.")] = None,
    rate: Annotated[float, typer.Option("--rate", min=1, max=1_000, help="Messages a second.")] = 200,
    devices: Annotated[
        int, typer.Option("--devices", min=2, max=100_000, help="Number of devices that send them, in turn.")
    ] = 50,
    reconnecting: Annotated[
        int,
        typer.Option("--reconnecting", min=0, max=200, help="Number of devices that lose their connections and reconnect."),
    ] = 8,
    only: Annotated[list[KillKind] | None, typer.Option("--only", help="Only this kind of kill; repeatable.")] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Run the lifecycle job on a Spark cluster, and kill its parts, too.")
    ] = False,
    pause: Annotated[float, typer.Option("--pause", min=0, help="Seconds between two kills, on average.")] = 4,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the home, and print its path.")] = False,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line: each kind of kill, then all.")
    ] = False,
) -> None:
    """Kill processes of a fleet under load, at random, and account for every message.

    The fleet is a new one, in a temporary home and on free ports; so is the cluster of --cluster.
    """
    victims = tuple(kind for kind in KillKind if (cluster or kind not in OF_CLUSTER) and (not only or kind in only))
    if only and len(victims) < len(set(only)):
        raise Misuse(
            f"{' and '.join(OF_CLUSTER)} are killed only on a cluster; add --cluster, or omit these kinds", code="option-conflict"
        )
    from cli.chaos.scenario import ChaosPlan
    from cli.chaos.scenario import chaos as run

    chosen = SystemRandom().randrange(10**6) if seed is None else seed
    shown = Console(stderr=True)

    def report(line: str) -> None:
        shown.print(line, highlight=False, soft_wrap=True)

    report(f"seed {chosen}: repeat the same kills and messages with --seed {chosen}")
    found = run(ChaosPlan(rounds, chosen, rate, devices, reconnecting, victims, pause, keep, cluster), report)
    rows = [line.shown(victim.value) for victim, line in sorted(found.lines.items())]
    total = _total(rows)
    if json_lines:
        as_json(
            [
                *rows,
                {
                    **total,
                    "seed": chosen,
                    **found.balance,
                    "transitions": found.transitions,
                    "reconnects": found.reconnects,
                    "unasked": found.unasked,
                },
            ]
        )
    else:
        _show([*rows, total] if len(rows) > 1 else rows, found)
    if not found.clean:
        raise FleetError("chaos found faults:\n" + "\n".join(f"  {fault}" for fault in found.faults), code="chaos-faults")


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    summed = {name: sum(row[name] for row in rows) for name in COLUMNS[1:-2]}
    return {"kill": "all", **summed, "recovery_s": None, "longest_s": max(row["longest_s"] for row in rows)}


def _show(rows: list[dict[str, Any]], found: Any) -> None:
    formatted = [{name: f"{value:,}" if isinstance(value, int) else value for name, value in row.items()} for row in rows]
    screen = console()
    screen.print(as_table(formatted, COLUMNS, "chaos"))
    parts = ", ".join(f"{count:,} {name}" for name, count in found.balance.items() if name != "received")
    screen.print(f"messages received: {found.balance['received']:,} = {parts}; {found.transitions:,} transitions", soft_wrap=True)
    if found.unasked:
        screen.print(f"ended without being killed, and were restarted: {found.unasked}")
