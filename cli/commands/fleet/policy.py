"""``fleet policy``: check and apply policies."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, JsonOption
from cli.common.output import as_json, as_markup, console
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import RULES, Policy, parse_policy
from fleetpulse.core.rows import EVERYONE
from fleetpulse.core.times import format_duration, format_instant, parse_instant_ms
from fleetpulse.io.home.command_spool import spool
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import in_use
from fleetpulse.io.system.wall_clock import wall_clock_ms

FileArgument = Annotated[Path, typer.Argument(help="TOML file.")]
policy = typer.Typer(no_args_is_help=True, help="Check and apply policies: timeouts, error limits and other rules.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(policy, name="policy")


def _load(file: Path) -> Policy:
    from cli.common.policy_files import read_toml

    return parse_policy(read_toml(file))


@policy.command("check")
def check(file: FileArgument, json_lines: JsonOption = False) -> None:
    """Check a policy file, and show the rules of each class."""
    checked = _load(file)
    if json_lines:
        as_json([{"policy_version": checked.version, "policy": checked.normalised()}])
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=f"policy {checked.version}", title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    classes = {"every other class": checked.rules, **checked.classes}
    table.add_column("rule")
    for name in classes:
        table.add_column(as_markup(name))
    for name, rule in RULES.items():
        values = (getattr(rules, name) for rules in classes.values())
        table.add_row(rule.key, *(as_markup(_shown(name, value)) for value in values))
    shown = console()
    shown.print(table)
    shown.print(f"unknown devices: {checked.unknown_devices}")
    for metric, vital in sorted(checked.vitals.items()):
        shown.print(as_markup(f"vitals of {metric}: {vital.described()}"))


def _shown(name: str, value: Any) -> str:
    if name.endswith("_ms"):
        return format_duration(value)
    return ", ".join(value) if isinstance(value, tuple) else str(value)


@policy.command("apply")
def apply(
    file: FileArgument,
    from_: Annotated[str | None, typer.Option("--from", help="Instant at which it takes effect; now by default.")] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Apply a policy, from now or from a later instant."""
    checked, opened = _load(file), Home(home)
    opened.record()
    content: dict[str, object] = {"policy": checked.normalised()}
    when = "from now"
    if from_ is not None:
        from_ms = parse_instant_ms(from_)
        if from_ms <= wall_clock_ms():
            raise FleetError(
                f"a policy cannot take effect in the past; got {format_instant(from_ms)}; omit --from for now",
                code="instant-past",
            )
        content["effective_from"], when = from_ms, f"from {format_instant(from_ms)}"
    spool(opened, [(f"fleet/{EVERYONE}/{EVERYONE}/policy", content)])
    running = in_use(opened)
    typer.echo(f"policy {checked.version} is in effect {when}" + ("" if running else ", when the fleet runs (./fleet up)"))
