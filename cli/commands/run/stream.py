"""``fleet stream``: stop the lifecycle job alone, and start it again, while everything else of a run goes on."""

import json
import time
from typing import Annotated

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, JsonOption
from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.desired_state import RUNNING, STOPPED, get_desired, set_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import runs

ByOption = Annotated[str, typer.Option("--by", help="Who asks: it is shown to others.")]
OwnOption = Annotated[bool, typer.Option("--own", help="Refuse where somebody else has stopped it.")]
_PATIENCE_S = 120.0
stream = typer.Typer(no_args_is_help=True, help="The lifecycle job alone: stop it, start it, while all else goes on.")


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.add_typer(stream, name="stream")


@stream.command("stop")
def stop(home: HomeOption = DEFAULT_HOME, by: ByOption = "an operator", own: OwnOption = False) -> None:
    """Stop the lifecycle job, and wait until it has let go of its state; it stays stopped until it is started.

    What a jitter holds back is written before.
    """
    from cli.supervisor.flush import say_held_back

    opened = Home(home)
    opened.record()
    say_held_back(opened)
    _say(opened, STOPPED, by, own=own)
    limit = time.monotonic() + _PATIENCE_S
    while holder := opened.state_holder():
        if time.monotonic() > limit:
            raise FleetError(
                f"{holder} still has the state after {_PATIENCE_S:.0f} s; see the logs in {opened.logs}", code="state-still-held"
            )
        time.sleep(0.2)
    typer.echo(f'the lifecycle job of "{home}" is stopped; what comes in waits for it')


@stream.command("start")
def start(home: HomeOption = DEFAULT_HOME, by: ByOption = "an operator", own: OwnOption = False) -> None:
    """Let the lifecycle job run again."""
    opened = Home(home)
    opened.record()
    _say(opened, RUNNING, by, own=own)
    starts = runs(opened, "lifecycle")
    typer.echo(f'the lifecycle job of "{home}" {"starts" if starts else f"will start with: ./fleet up --home {home}"}')


def _say(home: Home, what: str, by: str, *, own: bool) -> None:
    """Write the word down; with ``own`` not over a stop that somebody else has said, however shortly before."""
    written = None if own else set_desired(home, what, by)
    while written is None:
        found = get_desired(home)
        if found.what == STOPPED and found.by != by:
            raise FleetError(
                f"the stream is stopped by {found.by}, and only who stopped it starts it again; wait until that is done, "
                f"or start it: ./fleet stream start --home {home.path}",
                code="stream-stopped-by-other",
            )
        written = set_desired(home, what, by, only_if=found)


@stream.command("wanted")
def wanted(home: HomeOption = DEFAULT_HOME) -> None:
    """Say whether the lifecycle job is to run, and who said so."""
    opened = Home(home)
    opened.record()
    found = get_desired(opened)
    typer.echo(f"{found.what}, by {found.by}")


@stream.command("supervise")
def supervise(
    home: HomeOption = DEFAULT_HOME,
    by: ByOption = "fleet stream supervise",
    as_json: JsonOption = False,
) -> None:
    """Look at the lifecycle job once, and start it where it is dead and to run; to be called each minute.

    Exit code 1 where it is stale, beyond a threshold, backing off, left stopped by a run of Airflow, nobody runs it, or no bridge
    listens.
    """
    from fleetpulse.reports.supervisor import as_facts, look_after
    from fleetpulse.settings import load_settings

    opened = Home(home)
    opened.record()
    look = look_after(opened, by, load_settings(home).stale_after)
    if as_json:
        typer.echo(json.dumps(as_facts(look)))
    if not look.sound:
        raise FleetError(f'the lifecycle job of "{home}" is {look.state}: {look.why}', code="job-unwell")
    if not as_json:
        typer.echo(f"{look.state}: {look.why}")
