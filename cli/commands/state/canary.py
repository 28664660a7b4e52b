"""A canary beside the running job: how that is stopped for the comparison, and started again."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from batch.state.canary import Trial, canary
from batch.state.operations import StateOperation, check_form
from fleetpulse.core.errors import FleetError
from fleetpulse.io.checkpoints.checkpoint import position_after
from fleetpulse.io.checkpoints.generations import none_held
from fleetpulse.io.home.desired_state import stopped_meanwhile
from fleetpulse.io.home.exclusive import exclusive_state_change
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import runs

_PATIENCE_S = 120.0


def beside(work: StateOperation, verb: str, form: int, for_s: float) -> None:
    """Run a generation of another stored form beside the one that runs, and switch if both say the same.

    Args:
        work: what to work with; dry, it is only said what would be done.
        verb: which asks for it.
        form: the stored form.
        for_s: how long both run side by side, seconds.

    Raises:
        FleetError: nothing runs, a generation is held, another canary runs, or they differ.
    """
    home = work.home
    check_form(home, form)
    if home.state_holder() is None or not runs(home, "lifecycle"):
        raise FleetError(
            f'a canary runs beside the job, and none runs in "{home.path}"; start it: ./fleet up --home {home.path}, '
            f"or leave --canary",
            code="canary-without-job",
        )
    none_held(home.lifecycle)
    if work.dry:
        work.say(_described(home, form, for_s))
        return
    with exclusive_state_change(home, f"fleet state {verb} --canary", work.say):
        canary(work, verb, Trial(home.key_groups(), form, for_s, lambda: _stopped(home, verb)))


def _described(home: Home, form: int, for_s: float) -> str:
    current, at = home.generation(), position_after(home.checkpoint)
    return (
        f"generation {current.number}: {current.key_groups} key groups, {at.partitions} partitions, stored form {current.form}; "
        f"a canary of stored form {form} is to judge the live input beside it for {for_s:.0f} s, and to say it aside; then the "
        f"job is stopped while both are compared, and the canary gets the work where both say the same"
    )


@contextmanager
def _stopped(home: Home, verb: str) -> Iterator[None]:
    """Hold the running job stopped, and its state."""
    with stopped_meanwhile(home, f"fleet state {verb} --canary"):
        limit = time.monotonic() + _PATIENCE_S
        while holder := home.state_holder():
            if time.monotonic() > limit:
                raise FleetError(
                    f"{holder} still has the state after {_PATIENCE_S:.0f} s; see the logs in {home.logs}",
                    code="state-still-held",
                )
            time.sleep(0.1)
        with home.state_held(f"fleet state {verb} --canary"):
            yield
