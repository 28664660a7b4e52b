"""Facts about the newest cohort of a rollout."""

from pathlib import Path

import pytest

from fleetpulse.core.rollouts.cohorts import cohort_of, command_id
from fleetpulse.core.rollouts.plan import parse_rollout_plan
from fleetpulse.core.rollouts.rollout import CohortRecord, Rollout
from fleetpulse.core.rollouts.verdict import Answers, Observation
from fleetpulse.core.streams.tables import COMMANDS
from fleetpulse.io.home.rollouts import StoredRollout
from fleetpulse.reports.rollouts.newest import observe_newest
from tests.support.homes.rolled_out import RolledOutHome
from tests.support.homes.streams import append

pytestmark = pytest.mark.unit
PLAN = parse_rollout_plan({"name": "p-2", "version": "2", "scope": "TRUE", "soak": "2m", "cohorts": [30, 60, 100]})


def test_the_rest_has_the_devices_of_later_cohorts_only(tmp_path: Path) -> None:
    fleet = RolledOutHome(tmp_path / "home")
    StoredRollout(fleet.home, PLAN.name).create([(name, "north") for name in fleet.pumps])
    sizes = [sum(cohort_of(PLAN.name, name, PLAN.cohorts) == number for name in fleet.pumps) for number in (1, 2, 3)]
    first = CohortRecord(1, sizes[0], "ann", fleet.now_ms - 5_000, fleet.now_ms - 5_000)
    second = CohortRecord(2, sizes[1], "ann", fleet.now_ms, fleet.now_ms)
    fleet.run(60)
    seen = observe_newest(fleet.home, Rollout(PLAN, 40, "ann", (first, second)), expects_answers=False)
    assert (seen.number, seen.cohort.devices, seen.rest.devices, seen.answers) == (2, sizes[1], sizes[2], None)


def test_answers_are_those_to_the_commands_of_the_cohort(tmp_path: Path) -> None:
    fleet = RolledOutHome(tmp_path / "home")
    StoredRollout(fleet.home, PLAN.name).create([(name, "north") for name in fleet.pumps])
    treated = [name for name in fleet.pumps if cohort_of(PLAN.name, name, PLAN.cohorts) == 1]
    base = {"sent_at_ms": fleet.now_ms, "answered_at_ms": fleet.now_ms + 1, "status": "acknowledged", "answer_position": 1}
    ids = (command_id(PLAN.name, 1, treated[0]), "another")
    append(fleet.home, COMMANDS, *({**base, "device_id": treated[0], "command_id": one} for one in ids))
    found = Rollout(PLAN, 40, "ann", (CohortRecord(1, len(treated), "ann", fleet.now_ms, fleet.now_ms),))
    assert observe_newest(fleet.home, found, expects_answers=True).answers == Answers(len(treated) - 1, 1)


def test_a_cohort_whose_commands_are_not_sent_is_not_observed(tmp_path: Path) -> None:
    fleet = RolledOutHome(tmp_path / "home")
    found = Rollout(PLAN, 40, "ann", (CohortRecord(1, 4, "ann", fleet.now_ms),))
    assert observe_newest(fleet.home, found, expects_answers=True) == Observation(1, None, None)
