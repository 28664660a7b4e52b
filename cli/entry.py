"""Entry point of ``fleet``: dispatch to a verb, error messages and exit codes.

Rule 1: the exit code is 0 for success, 1 for a refusal or failure, 2 for misuse. The error is one
sentence on standard error.
Rule 2: a job keeps imported modules in memory while it runs, so it imports no other verbs.
"""

import sys

import typer

from fleetpulse.core.errors import FleetError
from fleetpulse.io.delta.corruption import DamagedError, corruption_message
from fleetpulse.io.system.fsync import is_disk_full

_JOB = "job"


def run() -> None:
    """Run the command, and exit with a message and an exit code if it fails."""
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
        if (refused := _expected_error(error)) is None:
            raise  # a bug: print the whole traceback
        typer.echo(f"fleet: {refused}", err=True)
        sys.exit(refused.exit_code)


def _expected_error(error: Exception) -> FleetError | None:
    """Return the error for a full disk or a damaged file; None for a bug."""
    if is_disk_full(error):
        where = f' ("{error.filename}")' if isinstance(error, OSError) and error.filename else ""
        return FleetError(
            f"the disk is full{where}; free some space, as ./fleet maintain does, and run the command again", code="disk-full"
        )
    why = corruption_message(error)
    return None if why is None else DamagedError("a table or file that the command needs", why)
