"""`fleet rollout`: the verbs over a small fleet, refusals, and steps that a kill interrupts."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from fleetpulse.core.errors import FleetError
from fleetpulse.core.rollouts.cohorts import cohort_of, command_id
from fleetpulse.core.rollouts.plan import RolloutPlan, parse_rollout_plan
from fleetpulse.core.rollouts.rollout import Status
from fleetpulse.core.streams.tables import COMMANDS
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.rollouts import StoredRollout
from fleetpulse.reports.operations.audit import audited_actions
from fleetpulse.reports.rollouts import outlook as outlooks
from fleetpulse.reports.rollouts import steps
from tests.support.histories.histories import row
from tests.support.homes.rolled_out import TIMEOUT_S, RolledOutHome
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
PLAN = """
name = "pumps-2"
version = "2.0"
scope = "device_class = 'pump'"
cohorts = [30, 60, 100]
soak = "2m"
flash = "40s"
least_devices = 5
"""


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RolledOutHome:
    """Return a home with 40 pumps and 10 sensors; its event time is the wall clock."""
    found = RolledOutHome(tmp_path / "home")
    for module in (steps, outlooks):
        monkeypatch.setattr(module, "wall_clock_ms", lambda: found.now_ms)
    return found


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """Return a file with the plan."""
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def plan_of(**changes: Any) -> RolloutPlan:
    """Return the plan with other values."""
    import tomllib

    return parse_rollout_plan({**tomllib.loads(PLAN), **changes})


check = partial(steps.check, expects_answers=False)
advance = partial(steps.advance, expects_answers=False)


def run(home: Home, *arguments: str) -> Any:
    """Run a verb."""
    return CliRunner().invoke(app, ["rollout", *arguments, "--home", str(home.path)])


def sent(home: Home) -> list[tuple[str, dict[str, Any]]]:
    """Return topic and payload of each command in the spool, in their order."""
    content = [json.loads(path.read_text()) for path in sorted(home.commands.glob("*.json"))]
    return [(command["topic"], command["payload"]) for commands in content for command in commands]


def firmware(home: Home) -> Counter[str]:
    """Return how often each device gets the command."""
    return Counter(topic.split("/")[2] for topic, payload in sent(home) if payload["op"] == "command")


def cohort(fleet: RolledOutHome, number: int) -> set[str]:
    """Return the devices of a cohort of the plan."""
    return {name for name in fleet.pumps if cohort_of("pumps-2", name, (30, 60, 100)) == number}


def test_a_good_firmware_reaches_every_device_of_the_scope_once(fleet: RolledOutHome, plan_file: Path) -> None:
    planned = run(fleet.home, "plan", str(plan_file))
    assert planned.exit_code == 0 and "devices: 40 (device_class = 'pump')" in planned.stdout
    for number in (1, 2, 3):
        done = run(fleet.home, "start", str(plan_file)) if number == 1 else run(fleet.home, "advance", "pumps-2")
        assert done.exit_code == 0 and f"cohort {number} of 3" in done.stdout, done.output
        assert firmware(fleet.home) == Counter(set().union(*(cohort(fleet, one) for one in range(1, number + 1))))
        early = run(fleet.home, "advance", "pumps-2")
        assert early.exit_code == 1 and "has not passed: nothing is judged yet" in str(early.exception)
        fleet.run(140)
        assert run(fleet.home, "check", "pumps-2").stdout.startswith(f"passed: cohort {number}, observed for 2m11s: 0 of ")
    [found] = [json.loads(line) for line in run(fleet.home, "status", "--json").stdout.splitlines()]
    assert (found["status"], found["cohort"], len(found["steps"])) == ("completed", 3, 3)
    assert run(fleet.home, "advance", "pumps-2").exit_code == 1
    actions = [(one["action"], one["result"]) for one in audited_actions(fleet.home)]
    assert ("rollout start", "ok") in actions and ("rollout advance", "rollout-not-passed") in actions


def test_a_present_device_gets_the_announcement_before_the_command_and_an_offline_one_only_the_command(
    fleet: RolledOutHome,
) -> None:
    silent = sorted(cohort(fleet, 1))[:1]
    fleet.run(100, silent=silent)
    steps.start(fleet.home, plan_of(), None)
    by_device: dict[str, list[dict[str, Any]]] = {}
    for topic, payload in sent(fleet.home):
        by_device.setdefault(topic, []).append(payload)
    assert set(by_device) == {f"fleet/north/{name}/control" for name in cohort(fleet, 1)}
    for topic, payloads in by_device.items():
        name = topic.split("/")[2]
        expected = {"op": "command", "id": command_id("pumps-2", 1, name), "name": "firmware", "payload": {"version": "2.0"}}
        announced = [] if name in silent else [{"op": "update", "until": fleet.now_ms + 40_000}]
        assert payloads == [*announced, expected]


def test_a_bad_firmware_stops_in_its_first_cohort(fleet: RolledOutHome, plan_file: Path) -> None:
    assert run(fleet.home, "start", str(plan_file), "--json").exit_code == 0
    fleet.run(40 + TIMEOUT_S, silent=cohort(fleet, 1))
    checked = run(fleet.home, "check", "pumps-2", "--json")
    assert checked.exit_code == 1
    found = json.loads(checked.stdout)
    size = len(cohort(fleet, 1))
    assert found["observed"]["cohort"] == {"devices": size, "offline": size, "errors": 0}
    assert (found["status"], found["verdict"]["result"], found["verdict"]["baseline"]) == ("stopped", "stopped", "rest")
    assert f"{size} of {size} (100.0 %) devices went offline, of the rest 0 of {40 - size} (0.0 %)" in str(checked.exception)
    before = firmware(fleet.home)
    fleet.run(120)
    for arguments in (["advance", "pumps-2"], ["check", "pumps-2"], ["start", str(plan_file)]):
        assert run(fleet.home, *arguments).exit_code == 1
    assert firmware(fleet.home) == before == Counter(cohort(fleet, 1))
    assert "went offline" in run(fleet.home, "status", "pumps-2").stdout


def test_a_passed_cohort_that_fails_later_stops_at_the_next_step(fleet: RolledOutHome) -> None:
    steps.start(fleet.home, plan_of(), None)
    fleet.run(140)
    assert check(fleet.home, "pumps-2")[0].current.passed
    fleet.run(100, silent=cohort(fleet, 1))
    with refused("rollout-ended"):
        advance(fleet.home, "pumps-2")
    assert firmware(fleet.home) == Counter(cohort(fleet, 1))


def test_a_cohort_whose_devices_did_not_answer_waits(fleet: RolledOutHome) -> None:
    steps.start(fleet.home, plan_of(), None)
    fleet.run(140)
    ids = {command_id("pumps-2", 1, name): name for name in sorted(cohort(fleet, 1))}

    def answer(status: str, some: slice) -> None:
        at = {"sent_at_ms": fleet.now_ms - 130_000, "answered_at_ms": None if status == "pending" else fleet.now_ms}
        fleet.append(COMMANDS, *({"command_id": one, "device_id": ids[one], "status": status, **at} for one in [*ids][some]))

    answer("pending", slice(None))
    answer("acknowledged", slice(4))
    answer("rejected", slice(4, 5))
    _, verdict, seen = check(fleet.home, "pumps-2")
    assert verdict.reason.startswith("4 devices acknowledged the command, fewer than least_devices (5); 1 rejected it")
    assert seen.answers is not None and seen.answers.pending == len(ids) - 5
    answer("acknowledged", slice(5, 6))
    assert check(fleet.home, "pumps-2")[1].result == "passed"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"least_devices": 30}, "rollout-cohort-too-small"),
        ({"scope": "site = 'nowhere'"}, "rollout-cohort-too-small"),
        ({"soak": "99s"}, "rollout-soak-too-short"),
        ({"scope": "TRUE", "soak": "129s"}, "rollout-soak-too-short"),
        ({"flash": "11m", "soak": "1h"}, "rollout-flash-too-long"),
        ({"scope": "seq = 1"}, "rollout-scope-invalid"),
    ],
)
def test_a_plan_that_proves_nothing_is_refused_and_leaves_nothing(
    fleet: RolledOutHome, changes: dict[str, Any], code: str
) -> None:
    with refused(code):
        steps.start(fleet.home, plan_of(**changes), None)
    assert sent(fleet.home) == [] and run(fleet.home, "status").stdout == "rollouts: none\n"
    outlooks.outlook(fleet.home, plan_of(scope="TRUE", soak="130s"))


def test_a_start_is_bound_to_the_number_of_planned_devices(fleet: RolledOutHome) -> None:
    with refused("rollout-more-devices"):
        steps.start(fleet.home, plan_of(), None, at_most=39)
    assert steps.start(fleet.home, plan_of(), None, at_most=40)[1] is True


def test_a_start_is_repeated_only_with_the_same_plan_and_owner(fleet: RolledOutHome) -> None:
    first, _ = steps.start(fleet.home, plan_of(), "run 1")
    assert steps.start(fleet.home, plan_of(), "run 1") == (first, False)
    for changed, owner in ((plan_of(soak="3m"), "run 1"), (plan_of(), "run 2")):
        with refused("rollout-exists"):
            steps.start(fleet.home, changed, owner)
    assert firmware(fleet.home) == Counter(cohort(fleet, 1))


def test_two_running_rollouts_share_no_device(fleet: RolledOutHome) -> None:
    steps.start(fleet.home, plan_of(), None)
    with refused("rollout-overlaps", match='"pumps-2" runs for 40 of these devices'):
        steps.start(fleet.home, plan_of(name="all", scope="TRUE", soak="5m"), None)
    steps.stop(fleet.home, "pumps-2", "enough")
    steps.start(fleet.home, plan_of(name="all", scope="TRUE", soak="5m"), None)


def test_a_rollout_is_stopped_by_a_person_or_by_its_owner(fleet: RolledOutHome, plan_file: Path) -> None:
    run(fleet.home, "start", str(plan_file), "--owner", "run 1")
    other = run(fleet.home, "stop", "pumps-2", "--owner", "run 2", "--own")
    assert other.exit_code == 1 and "belongs to run 1" in str(other.exception)
    unused = run(fleet.home, "stop", "pumps-2", "--owner", "run 2")
    assert isinstance(unused.exception, FleetError) and unused.exception.code == "option-conflict"
    assert run(fleet.home, "stop", "pumps-2", "--dry-run").exit_code == 0
    assert StoredRollout(fleet.home, "pumps-2").read().status is Status.RUNNING
    assert run(fleet.home, "stop", "pumps-2", "--why", "it smokes").stdout == 'the rollout "pumps-2" is stopped\n'
    assert run(fleet.home, "stop", "pumps-2").stdout == 'the rollout "pumps-2" was stopped before\n'
    with refused("rollout-ended", match="it smokes"):
        advance(fleet.home, "pumps-2")


def test_a_device_that_left_the_service_gets_no_command(fleet: RolledOutHome) -> None:
    steps.start(fleet.home, plan_of(), None)
    [gone, *_] = sorted(cohort(fleet, 2))
    fleet.batch(row(fleet.now_s + 2, f"fleet/north/{gone}/registry", op="decommission"))
    fleet.run(140, silent=[gone])
    found, _ = advance(fleet.home, "pumps-2")
    assert found.current.devices == len(cohort(fleet, 2)) - 1
    assert firmware(fleet.home) == Counter((cohort(fleet, 1) | cohort(fleet, 2)) - {gone})


def test_a_dry_run_changes_nothing(fleet: RolledOutHome, plan_file: Path) -> None:
    started = run(fleet.home, "start", str(plan_file), "--dry-run")
    assert started.exit_code == 0 and f"cohort 1: {len(cohort(fleet, 1))} devices\n" in started.stderr
    assert not (fleet.home.path / "rollouts").exists() and sent(fleet.home) == []
    steps.start(fleet.home, plan_of(), None)
    fleet.run(140)
    before = (fleet.home.path / "rollouts" / "pumps-2" / "rollout.json").read_text()
    advanced = run(fleet.home, "advance", "pumps-2", "--dry-run", "--to", "2")
    assert f"would start cohort 2, up to 60 %: {len(cohort(fleet, 2))} devices" in advanced.stderr
    assert run(fleet.home, "check", "pumps-2", "--dry-run").exit_code == 0
    assert (fleet.home.path / "rollouts" / "pumps-2" / "rollout.json").read_text() == before
    assert run(fleet.home, "advance", "pumps-2", "--dry-run", "--to", "3").exit_code == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["start", "other-plan", "--owner", "run 1"], "rollout-exists"),
        (["start", "plan", "--owner", "run 2"], "rollout-exists"),
        (["start", "overlapping"], "rollout-overlaps"),
        (["start", "new", "--devices-at-most", "9"], "rollout-more-devices"),
        (["start", "small"], "rollout-cohort-too-small"),
        (["advance", "pumps-2"], "rollout-not-passed"),
        (["advance", "pumps-2", "--to", "3"], "rollout-cohort-unexpected"),
        (["advance", "none"], "rollout-unknown"),
        (["stop", "none"], "rollout-unknown"),
        (["stop", "pumps-2", "--own", "--owner", "run 2"], "rollout-of-other"),
    ],
)
def test_a_dry_run_refuses_what_the_step_refuses(fleet: RolledOutHome, tmp_path: Path, words: list[str], code: str) -> None:
    plans = {
        "plan": plan_of(),
        "other-plan": plan_of(soak="3m"),
        "overlapping": plan_of(name="all", scope="TRUE", soak="5m"),
        "new": plan_of(name="sensors", scope="device_class = 'sensor'", soak="5m", least_devices=1),
        "small": plan_of(name="small", scope="device_id = 'sensor-1'", soak="5m"),
    }
    for name, plan in plans.items():
        lines = [f"{key} = {json.dumps(value)}" for key, value in plan.content().items() if key != "bounds"]
        (tmp_path / name).write_text("\n".join(lines))
    steps.start(fleet.home, plans["plan"], "run 1")
    words = [str(tmp_path / word) if word in plans else word for word in words]
    before = sorted((path, path.read_bytes()) for path in (fleet.home.path / "rollouts").rglob("*.json"))
    planned, done = run(fleet.home, *words, "--dry-run"), run(fleet.home, *words)
    assert (planned.exit_code, done.exit_code) == (1, 1)
    assert str(planned.exception) == str(done.exception) and getattr(done.exception, "code", None) == code
    assert sorted((path, path.read_bytes()) for path in (fleet.home.path / "rollouts").rglob("*.json")) == before


def test_a_dry_run_of_a_repeated_step_names_its_completion(fleet: RolledOutHome, plan_file: Path) -> None:
    for words in (["start", str(plan_file)], ["advance", "pumps-2", "--to", "2"]):
        assert run(fleet.home, *words).exit_code == 0
        planned, done = run(fleet.home, *words, "--dry-run"), run(fleet.home, *words)
        assert (planned.exit_code, done.exit_code) == (0, 0)
        assert "has started already" in planned.stderr and "had started already" in done.stdout
        fleet.run(140)


def test_each_verb_prints_the_same_fields_as_json(fleet: RolledOutHome, plan_file: Path) -> None:
    steps_of = [["start", str(plan_file)], ["status"], ["status", "pumps-2"], ["check", "pumps-2"], ["advance", "pumps-2"]]
    found: dict[str, dict[str, Any]] = {}
    for words in [*steps_of, ["stop", "pumps-2"]]:
        if words[0] == "advance":
            fleet.run(140)
        done = run(fleet.home, *words, "--json")
        assert done.exit_code == 0, done.output
        [found[" ".join(words)]] = [json.loads(line) for line in done.stdout.splitlines()]
    keys = [list(one) for one in found.values()]
    assert keys == [keys[0]] * len(found) and keys[0][-2:] == ["verdict", "observed"]
    started, stopped = found[f"start {plan_file}"], found["stop pumps-2"]
    assert (started["verdict"], started["end_requester"], stopped["status"]) == (None, None, "stopped")
    assert stopped["end_requester"] == stopped["steps"][0]["requester"] == stopped["owner"]
    assert found["check pumps-2"]["verdict"]["result"] == "waiting" and found["check pumps-2"]["observed"]["number"] == 1


def test_a_fleet_without_a_home_or_a_rollout_is_refused(fleet: RolledOutHome, tmp_path: Path) -> None:
    assert "known are: none" in str(run(fleet.home, "check", "pumps-2").exception)
    assert run(Home(tmp_path / "nothing"), "status").exit_code == 1


class Killed(BaseException):
    """End of the process at a sync of the disk."""


def killed_at_each_sync(
    home: Home, monkeypatch: pytest.MonkeyPatch, copy: Path, step: Callable[[Home], object], first: int = 0
) -> Iterator[Home]:
    """Yield a copy of a home for each sync of a step from the first wanted one, at which the process was killed."""
    sync = os.fsync
    for place in range(first, 100):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(home.path, copy)
        left = [place]

        def fail(descriptor: int, left: list[int] = left) -> None:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            sync(descriptor)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail)
            try:
                step(Home(copy))
            except Killed:
                pass
            else:
                return
        yield Home(copy)
    pytest.fail("the step has no end")


def test_a_start_that_is_killed_anywhere_is_completed_without_a_second_command(
    fleet: RolledOutHome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kills = 0
    for home in killed_at_each_sync(fleet.home, monkeypatch, tmp_path / "copy", lambda home: steps.start(home, plan_of(), "me")):
        kills += 1
        found, _ = steps.start(home, plan_of(), "me")
        assert found.current.sent_ms is not None and len(found.cohorts) == 1
        assert firmware(home) == Counter(cohort(fleet, 1)), f"after the kill at sync {kills}"
    assert kills > 8


def test_an_advance_that_is_killed_anywhere_is_completed_by_the_next_check(
    fleet: RolledOutHome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps.start(fleet.home, plan_of(), None)
    fleet.run(140)
    check(fleet.home, "pumps-2")
    completed = 0
    for home in killed_at_each_sync(fleet.home, monkeypatch, tmp_path / "copy", lambda home: advance(home, "pumps-2", 2)):
        found = check(home, "pumps-2")[0]
        assert firmware(home) == Counter(set().union(*(cohort(fleet, one.number) for one in found.cohorts)))
        completed += len(found.cohorts) == 2
        found, _ = advance(home, "pumps-2", 2)
        assert len(found.cohorts) == 2 and firmware(home) == Counter(cohort(fleet, 1) | cohort(fleet, 2))
    assert completed > 3


def test_a_rollout_that_is_stopped_during_a_step_sends_nothing_more(
    fleet: RolledOutHome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stops = 0
    for home in killed_at_each_sync(
        fleet.home, monkeypatch, tmp_path / "copy", lambda home: steps.start(home, plan_of(), "me"), 8
    ):
        stops += 1
        before = firmware(home)
        steps.stop(home, "pumps-2", "enough")
        with refused("rollout-exists"):
            steps.start(home, plan_of(), "me")
        assert check(home, "pumps-2")[1].result == "stopped"
        assert firmware(home) == before and StoredRollout(home, "pumps-2").waiting() == 0
    assert stops > 2
