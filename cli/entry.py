"""Where ``fleet`` begins: the verb that was asked for, and what is said where it fails.

Rule 1: exit 0 done, 1 refused, 2 misuse; what went wrong is one sentence on standard error.
Rule 2: a job holds what it loads for as long as it runs, so it loads nothing of the other verbs.
"""

import sys

import typer

from fleetpulse.core.errors import FleetError
from fleetpulse.io.delta.corruption import DamagedError, corruption_message
from fleetpulse.io.system.fsync import no_room

_JOB = "job"


def run() -> None:
    """The entry: errors are sentences, and their exit code says what kind they are."""
    try:
        if sys.argv[1:2] == [_JOB]:
            from cli.commands.run.job import jobs

            jobs(sys.argv[2:], prog_name=f"fleet {_JOB}")
        else:
            from cli.app import app

            app(prog_name="fleet")
    except FleetError as error:
        typer.echo(f"fleet: {error}", err=True)
        sys.exit(error.exit_code)
    except Exception as error:
        if (refused := _refused(error)) is None:
            raise  # a fault of ours: it is to be seen whole
        typer.echo(f"fleet: {refused}", err=True)
        sys.exit(refused.exit_code)


def _refused(error: Exception) -> FleetError | None:
    """Return what stood in the way, where that is no fault of ours."""
    if no_room(error):
        where = f' ("{error.filename}")' if isinstance(error, OSError) and error.filename else ""
        return FleetError(
            f"the disk is full{where}; free some space, as ./fleet maintain does, and give the command again", code="disk-full"
        )
    why = corruption_message(error)
    return None if why is None else DamagedError("what the command needs", why)
