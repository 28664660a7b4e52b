"""Kill coverage of ``./fleet state``: each reported step has a test with a kill, or an exception."""

import pytest

from fleetpulse.paths import ROOT
from tests.support.homes.state_steps import KILLED_AT, NOT_KILLED, OTHER_MODULES, STEP_MODULES, is_line_of, steps_in

pytestmark = pytest.mark.unit
STEPS = {step for name in STEP_MODULES for step in steps_in(ROOT / name)}


def test_each_reported_step_has_a_kill_or_a_reason_without_one() -> None:
    assert {*KILLED_AT, *NOT_KILLED} == STEPS
    assert not KILLED_AT & NOT_KILLED.keys()


def test_each_module_that_reports_steps_is_listed() -> None:
    reporting = {str(path.relative_to(ROOT)) for path in (ROOT / "batch").rglob("*.py") if list(steps_in(path))}
    assert reporting <= {*STEP_MODULES, *OTHER_MODULES}


def test_each_line_matches_exactly_one_step() -> None:
    for step in STEPS:
        assert [one for one in STEPS if is_line_of(one, step.replace("{}", "7"))] == [step]
    assert not is_line_of("building generation {}", "the building generation 7")
