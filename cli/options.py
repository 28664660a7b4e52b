"""Options that several commands have, each with the same words."""

from pathlib import Path
from typing import Annotated, Final

import typer

DEFAULT_HOME: Final = Path(".fleet")
HomeOption = Annotated[Path, typer.Option("--home", help="The folder that keeps everything.")]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]
RowsOption = Annotated[bool, typer.Option("--json", help="One JSON object a line, all rows.")]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")]
