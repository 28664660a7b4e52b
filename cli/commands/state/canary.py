"""``fleet state migrate --canary``: a trial generation beside the running job.

The running job is stopped only for the comparison, and started again afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from batch.state.canary import CanaryPlan, canary
from batch.state.operations import StateOperation, check_form
from fleetpulse.core.errors import FleetError
from fleetpulse.io.checkpoints.checkpoint import position_after
from fleetpulse.io.checkpoints.generations import require_none_held
from fleetpulse.io.home.desired_state import temporarily_stopped
from fleetpulse.io.home.exclusive import await_state_free, exclusive_state_change
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import runs


def run_canary_beside_job(work: StateOperation, verb: str, form: int, for_s: float) -> None:
    """Run a canary generation beside the current one, and activate it if both agree.

    Args:
        work: session over the home; in a dry run, only the plan is printed.
        verb: name of the calling command.
        form: format version of the stored form.
        for_s: duration for which both generations run, seconds.

    Raises:
        FleetError: the job does not run, a generation is held, another canary runs, or the output
            or state of the generations differs.
    """
    home = work.home
    check_form(home, form)
    if home.state_holder() is None or not runs(home, "lifecycle"):
        raise FleetError(
            f'--canary needs the running lifecycle job, and none runs in "{home.path}"; start it with: ./fleet up --home '
            f"{home.path}, or omit --canary",
            code="canary-without-job",
        )
    require_none_held(home.lifecycle)
    if work.dry:
        work.report(_described(home, form, for_s))
        return
    with exclusive_state_change(home, f"fleet state {verb} --canary", work.report):
        canary(work, verb, CanaryPlan(home.key_groups(), form, for_s, lambda: _stopped(home, verb)))


def _described(home: Home, form: int, for_s: float) -> str:
    current, at = home.generation(), position_after(home.checkpoint)
    return (
        f"generation {current.number}: {current.key_groups} key groups, {at.partitions} partitions, stored form {current.form}; "
        f"would run a canary of stored form {form} beside it for {for_s:.0f} s, judging the live input into a separate "
        f"table; then stop the job, compare both, and activate the canary if they are equal"
    )


@contextmanager
def _stopped(home: Home, verb: str) -> Iterator[None]:
    """Stop the running job, and hold its state, until the context exits."""
    with temporarily_stopped(home, f"fleet state {verb} --canary"):
        await_state_free(home)
        with home.state_held(f"fleet state {verb} --canary"):
            yield
