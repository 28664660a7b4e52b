"""``fleet fetch``: all that a start would fetch or compile, had beforehand; without Airflow no start needs a network then."""

import typer

from cli.supervisor.cds import keep_classes
from fleetpulse.io.spark.jars import JARS, KAFKA_JARS, resolve_jars
from fleetpulse.io.spark.java import find_java


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("fetch")(fetch)


def fetch() -> None:
    """Fetch Java where there is none, and Spark's JARs, compile the fold, and keep Spark's classes for quicker starts.

    No start with --no-airflow needs a network then.
    """
    from fleetpulse.io.system.kernel_cache import keep_kernels

    typer.echo(f"Java: {find_java()}")
    typer.echo(f"JARs: {len(resolve_jars(jars=(*JARS, *KAFKA_JARS)))} in the project's cache")
    keep_kernels()
    typer.echo("the fold is compiled")
    typer.echo(keep_classes())
