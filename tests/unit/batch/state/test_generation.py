"""A new generation is discarded if the work on it fails, unless it is already current."""

from pathlib import Path

import pytest

from batch.state.generation import discarded_on_failure
from fleetpulse.core.replay import Deployment
from fleetpulse.io.checkpoints.generations import begin_generation, load_generations, save_generations
from tests.support.homes.homes import empty

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("is_current", [False, True])
def test_a_generation_is_discarded_on_failure_unless_it_is_current(is_current: bool, tmp_path: Path) -> None:
    home = empty(tmp_path / "home", Deployment())
    home.lifecycle.mkdir(parents=True)
    current = home.generation()
    begun = begin_generation(
        home.lifecycle, current, key_groups=current.key_groups, form=current.form, made_by="test", made_from={}
    )
    if is_current:
        save_generations(home.lifecycle, load_generations(home.lifecycle).switched(begun.number, {}))
    with pytest.raises(KeyboardInterrupt), discarded_on_failure(home, begun):
        raise KeyboardInterrupt
    assert load_generations(home.lifecycle).known[begun.number].status == ("current" if is_current else "discarded")
