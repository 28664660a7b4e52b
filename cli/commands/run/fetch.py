"""``fleet fetch``: downloads and compilation in advance, for later starts."""

import typer

from cli.supervisor.cds import create_archive
from fleetpulse.io.spark.jars import JARS, KAFKA_JARS, resolve_jars
from fleetpulse.io.spark.java import find_java


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("fetch")(fetch)


def fetch() -> None:
    """Download and compile in advance everything that later starts need.

    This gets Java, unless it is installed, and Spark's JARs, compiles the fold, and creates Spark's
    class archive for faster starts. Afterwards, starts with --no-airflow need no network.
    """
    from fleetpulse.io.system.kernel_cache import ensure_kernels_compiled

    typer.echo(f"Java: {find_java()}")
    typer.echo(f"JARs: {len(resolve_jars(jars=(*JARS, *KAFKA_JARS)))} in the project's cache")
    ensure_kernels_compiled()
    typer.echo("the fold is compiled")
    typer.echo(create_archive())
