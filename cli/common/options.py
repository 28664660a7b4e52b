"""Command-line options that several commands share."""

from pathlib import Path
from typing import Annotated, Final

import typer

from fleetpulse.core.errors import Misuse
from fleetpulse.core.lifecycle import Mode
from fleetpulse.paths import home_folder

DEFAULT_HOME: Final = Path(".fleet")
HomeOption = Annotated[Path, typer.Option("--home", help="The folder of the home, with all its data.", callback=home_folder)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RowsOption = Annotated[bool, typer.Option("--json", help="Print all rows, one JSON object a line.")]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan, and change nothing.")]


def check_mode(name: str | None, *more: str) -> None:
    """Check the name of a mode, so that a typing error does not select zero devices.

    Args:
        name: name of the mode; None if no mode was requested.
        more: further accepted names.

    Raises:
        Misuse: there is no such mode.
    """
    known = [*(mode.value for mode in Mode), *more]
    if name is not None and name not in known:
        raise Misuse(f'the mode must be one of {", ".join(known)}; got "{name}"', code="mode-unknown")
