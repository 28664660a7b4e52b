"""``fleet fetch``: everything that a start would fetch or compile, had beforehand; a start needs no network afterwards."""

import typer

from fleetpulse.io.jars import JARS, KAFKA_JARS, resolve_jars
from fleetpulse.io.java import find_java


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("fetch")(fetch)


def fetch() -> None:
    """Fetch Java where there is none, and Spark's JARs, and compile the fold: no later start needs a network."""
    from fleetpulse.columnar.warm import warm

    typer.echo(f"Java: {find_java()}")
    typer.echo(f"JARs: {len(resolve_jars(jars=(*JARS, *KAFKA_JARS)))} in the project's cache")
    warm()
    typer.echo("the fold is compiled")
