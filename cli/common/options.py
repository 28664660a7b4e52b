"""Options that several commands have, each with the same words."""

from pathlib import Path
from typing import Annotated, Final

import typer

from fleetpulse.core.errors import Misuse
from fleetpulse.core.lifecycle import Mode

DEFAULT_HOME: Final = Path(".fleet")
HomeOption = Annotated[Path, typer.Option("--home", help="The folder that keeps everything.")]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]
RowsOption = Annotated[bool, typer.Option("--json", help="One JSON object a line, all rows.")]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")]


def check_mode(given: str | None, *more: str) -> None:
    """See that a mode is one: a slip in its name is not to pass for a fleet without such devices.

    Args:
        given: the mode; None where none was asked for.
        more: words that stand for a mode here as well.

    Raises:
        Misuse: it is none.
    """
    known = [*(mode.value for mode in Mode), *more]
    if given is not None and given not in known:
        raise Misuse(f'a mode is one of {", ".join(known)}; got "{given}"', code="mode-unknown")
