"""Entry point of ``fleet``: dispatch to a verb, error messages and exit codes.

Rule 1: the exit code is 0 for success, 1 for a refusal or failure, 2 for misuse. The error is one
sentence on standard error.
Rule 2: a job keeps imported modules in memory while it runs, so it imports no other verbs.
"""

import sys

import typer

from cli.common.errors import expected_error

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
    except Exception as error:
        if (refused := expected_error(error)) is None:
            raise  # a bug: print the whole traceback
        typer.echo(f"fleet: {refused}", err=True)
        sys.exit(refused.exit_code)
