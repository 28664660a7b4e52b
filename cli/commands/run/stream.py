"""``fleet stream``: stop and start the lifecycle job alone, by its desired state.

All other processes of the run keep running, so there is no coverage gap.
"""

import json
from typing import Annotated

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, JsonOption
from fleetpulse.core.errors import FleetError
from fleetpulse.core.streams.names import StreamName
from fleetpulse.io.home.desired_state import RUNNING, STOPPED, get_desired, set_desired
from fleetpulse.io.home.exclusive import await_state_free
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import runs

ByOption = Annotated[str, typer.Option("--by", help="Name of the caller, shown to other users.")]
OwnOption = Annotated[bool, typer.Option("--own", help="Refuse if it was stopped under another name.")]
stream = typer.Typer(no_args_is_help=True, help="Stop and start the lifecycle job alone; all other processes keep running.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(stream, name="stream")


@stream.command("stop")
def stop(home: HomeOption = DEFAULT_HOME, by: ByOption = "an operator", own: OwnOption = False) -> None:
    """Stop the lifecycle job, and wait until it has released its state.

    It stays stopped until ./fleet stream start. Delayed verdicts (verdict_jitter) are written
    before.
    """
    from cli.supervisor.flush import flush_delayed_verdicts

    opened = Home(home)
    opened.record()
    flush_delayed_verdicts(opened)
    _set_desired(opened, STOPPED, by, own=own)
    await_state_free(opened)
    typer.echo(f'the lifecycle job of "{home}" is stopped; new messages wait in bronze')


@stream.command("start")
def start(home: HomeOption = DEFAULT_HOME, by: ByOption = "an operator", own: OwnOption = False) -> None:
    """Start the lifecycle job again."""
    opened = Home(home)
    opened.record()
    _set_desired(opened, RUNNING, by, own=own)
    starts = runs(opened, "lifecycle")
    typer.echo(f'the lifecycle job of "{home}" {"starts" if starts else f"will start with: ./fleet up --home {home}"}')


def _set_desired(home: Home, state: str, by: str, *, own: bool) -> None:
    """Set the desired state; with ``own``, refuse if another caller stopped the job."""
    written = None if own else set_desired(home, state, by)
    while written is None:
        found = get_desired(home)
        if found.state == STOPPED and found.by != by:
            raise FleetError(
                f"the stream was stopped by {found.by}, and --own does not override another caller; wait until it is started "
                f"again, or start it: ./fleet stream start --home {home.path}",
                code="stream-stopped-by-other",
            )
        written = set_desired(home, state, by, only_if=found)


@stream.command("wanted")
def show_desired(home: HomeOption = DEFAULT_HOME) -> None:
    """Show the desired state of the lifecycle job, and who set it."""
    opened = Home(home)
    opened.record()
    found = get_desired(opened)
    typer.echo(f"{found.state}, by {found.by}")


@stream.command("supervise")
def supervise(
    home: HomeOption = DEFAULT_HOME,
    by: ByOption = "fleet stream supervise",
    as_json: JsonOption = False,
) -> None:
    """Check the lifecycle job once, and start it if it is dead.

    Call this command every minute. It does not start a job whose desired state is stopped. The exit
    code is 1 if the job is stale, beyond a threshold, backing off, left stopped by an Airflow run,
    or not supervised, or if no bridge is listening.
    """
    from fleetpulse.reports.operations.supervisor import as_facts, check_job
    from fleetpulse.settings import load_settings

    opened = Home(home)
    opened.record()
    check = check_job(opened, by, load_settings(home).stale_after)
    if as_json:
        typer.echo(json.dumps(as_facts(check)))
    if not check.sound:
        raise FleetError(f'the lifecycle job of "{home}" is {check.state}: {check.why}', code="job-unwell")
    if not as_json:
        typer.echo(f"{check.state}: {check.why}")


@stream.command("rebuild")
def rebuild(
    name: Annotated[StreamName, typer.Argument(help="Stream beside the lifecycle.")], home: HomeOption = DEFAULT_HOME
) -> None:
    """Rebuild the state of a stream beside the lifecycle from bronze, for example after damage.

    The lifecycle job must be stopped. When it starts, the stream reads a recent part of bronze again; sessions
    begin with their newest snapshot. Rows that the table has are not written twice. The former checkpoint is kept
    until the next rebuild.
    """
    from fleetpulse.io.streams.rebuilds import rebuild_stream

    opened = Home(home)
    opened.record()
    with opened.state_held("fleet stream rebuild"):
        found = rebuild_stream(opened, name)
    typer.echo(f'the stream "{name}" reads bronze again from version {found.begin:,}; {found.through:,} versions had landed')
