"""``fleet version``: print the version."""

import typer

from fleetpulse import __version__


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("version")(version)


def version() -> None:
    """Print the version."""
    typer.echo(__version__)
