"""Each step that a verb of ``./fleet state`` says has somebody who is killed there."""

import pytest

from fleetpulse.paths import ROOT
from tests.support.homes.state_steps import KILLED_AT, NOT_KILLED, OTHER_MODULES, STEP_MODULES, is_said, steps_in

pytestmark = pytest.mark.unit
STEPS = {step for name in STEP_MODULES for step in steps_in(ROOT / name)}


def test_a_step_that_the_code_says_is_killed_at_or_it_is_said_why_not() -> None:
    assert {*KILLED_AT, *NOT_KILLED} == STEPS
    assert not KILLED_AT & NOT_KILLED.keys()


def test_a_module_that_says_steps_is_listed() -> None:
    saying = {str(path.relative_to(ROOT)) for path in (ROOT / "batch").rglob("*.py") if list(steps_in(path))}
    assert saying <= {*STEP_MODULES, *OTHER_MODULES}


def test_a_line_says_one_step() -> None:
    for step in STEPS:
        assert [one for one in STEPS if is_said(one, step.replace("{}", "7"))] == [step]
    assert not is_said("building generation {}", "the building generation 7")
