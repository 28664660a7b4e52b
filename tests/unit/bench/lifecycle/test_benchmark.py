"""The benchmark of the job beside its peers: what is said of what was run, and sizes that cannot be generated."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from bench.lifecycle import plans as courses
from bench.lifecycle.benchmark import _require_equal, _round, cost_by_size, figures, json_line, python_ratios, round_line
from bench.lifecycle.compare import COLUMNS
from bench.lifecycle.generate import Fleet, Input, prepare
from bench.lifecycle.harness import Crashed, DidNotFinish, Run
from fleetpulse.core.errors import Misuse
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def _run(messages: int, cpu_s: float) -> Run:
    return Run(messages, cpu_s, cpu_s, [1_000, 2_000], 10**9, 10**6, Path())


def test_a_contender_that_was_compared_with_nobody_is_not_said_to_be_equal() -> None:
    [course, *_] = courses.PLANS[courses.QUICK](()).courses
    runs = {(0, courses.OURS): [_run(4_000_000, 2.0)], (0, courses.REFERENCE): [_run(4_000_000, 4.0), _run(4_000_000, 5.0)]}
    alone = figures(course, courses.OURS, {(0, courses.OURS): runs[0, courses.OURS]}, 0, None, compared=False)
    assert (alone["equal"], alone["ratio"]) == (None, None)
    beside = figures(course, courses.OURS, runs, 0, None, compared=True)
    assert (beside["equal"], beside["ratio"]) == (True, 2.0), "to the reference's best round"
    absent = figures(course, courses.OURS, runs, 0, "did not finish in 600 s", compared=True)
    assert (absent["equal"], absent["messages_per_cpu_s"]) == (None, None)


KEYS = [
    "contender", "devices", "active", "messages_per_cpu_s", "messages_per_s", "batch_p50_ms", "batch_p95_ms",
    "checkpoint_bytes_per_device", "peak_rss_mb", "ratio", "equal",
]  # fmt: skip


def test_a_line_of_json_has_the_same_keys_for_everyone_and_a_note_where_there_is_something_to_say() -> None:
    [course, *_] = courses.PLANS[courses.QUICK](()).courses
    runs = {(0, courses.OURS): [_run(4_000_000, 2.0)], (0, courses.REFERENCE): [_run(4_000_000, 4.0)]}
    ran = json.loads(json_line(figures(course, courses.OURS, runs, 0, None, compared=True)))
    assert list(ran) == KEYS and None not in ran.values()
    absent = json.loads(json_line(figures(course, courses.OURS, {}, 0, "did not finish in 600 s", compared=True)))
    assert list(absent) == [*KEYS, "note"]
    assert absent["note"] == "did not finish in 600 s"


@pytest.mark.parametrize("plan", courses.PLANS)
def test_contender_devices_and_active_name_one_line(plan: str) -> None:
    rows = [figures(course, name, {}, place, None, compared=False)
            for place, course in enumerate(courses.PLANS[plan](()).courses) for name in course.contenders]  # fmt: skip
    named = [(row["contender"], row["devices"], row["active"]) for row in rows if row["shown"]]
    assert len(set(named)) == len(named)
    if plan == courses.FULL:
        assert {(name, size, active) for name in courses.FAST for size in courses.SIZES for active in (1.0, 0.05)} <= {*named}
        assert {(name, 100_000, 1.0) for name in courses.PER_DEVICE} <= {*named}


def test_what_has_its_row_elsewhere_does_not_make_a_course_alone() -> None:
    full = courses.PLANS[courses.FULL](())
    assert len(full.restricted([courses.OURS, courses.REFERENCE]).courses) == len(full.courses) - 1
    assert len(full.restricted([courses.OURS, courses.PER_DEVICE[0]]).courses) == len(full.courses)


def test_how_far_apart_sizes_are_is_between_the_cheapest_and_the_dearest() -> None:
    costs = {10_000: 800_000, 100_000: 1_000_000, 1_000_000: 900_000}
    rows = [{"contender": "ours", "devices": size, "messages_per_cpu_s": rate} for size, rate in costs.items()]
    assert cost_by_size(rows) == [
        "ours: a message costs 1.00 us of CPU at 100,000 devices and 1.25 us at 10,000: 25% between them"
    ]


def test_python_called_for_each_device_is_told_in_times_over_the_same_input() -> None:
    told = [("ours", 10_000, 60_000), ("python-transform-with-state", 10_000, 6_000), ("ours", 100_000, 600_000),
            ("scala-flat-map-groups", 100_000, 250_000), ("python-transform-with-state", 100_000, 15_000),
            ("pyflink-keyed-process", 100_000, None)]  # fmt: skip
    rows = [{"contender": name, "devices": size, "messages_per_cpu_s": rate} for name, size, rate in told]
    assert python_ratios(rows) == [
        "10,000 devices: 10.0 times the messages per CPU second of python-transform-with-state",
        "100,000 devices: 40.0 times the messages per CPU second of python-transform-with-state",
    ]


@pytest.mark.parametrize(("plan", "devices"), [(courses.QUICK, 10), (courses.FLAT, 7_000_000), (courses.FLAT, 100)])
def test_a_size_that_cannot_be_generated_is_refused(plan: str, devices: int) -> None:
    with refused("bench-input-invalid", Misuse):
        courses.PLANS[plan]([devices])


def test_batches_of_another_size_go_with_the_flat_plan_alone() -> None:
    fleets = [course.fleet for course in courses.planned(courses.FLAT, [10_000, 1_000_000], 3_000_000).courses]
    assert fleets == [Fleet(10_000, 300, batches=3), Fleet(1_000_000, 3, batches=3)]
    assert courses.planned(courses.FLAT, ()) == courses.planned(courses.FLAT, (), courses.FLAT_ROWS)
    with refused("bench-input-invalid", Misuse):
        courses.planned(courses.FLAT, [1_000_000], 999_999)
    for plan in courses.PLANS.keys() - {courses.FLAT}:
        with refused("option-conflict", Misuse):
            courses.planned(plan, (), 3_000_000)


def test_every_contender_takes_part_in_the_full_benchmark_at_the_smaller_size() -> None:
    full = courses.PLANS[courses.FULL](())
    assert {*full.contenders} == {*courses.ALL}
    at_the_bar = [course for course in full.courses if course.fleet == Fleet(100_000, 12, batches=2)]
    assert {*courses.PER_DEVICE, courses.OURS} <= {name for course in at_the_bar for name in course.contenders}


def test_a_round_says_what_it_came_to_before_the_last_one_has_run() -> None:
    course = courses.Workload(Fleet(100_000, 12, one_in=20), (courses.OURS, courses.REFERENCE), rounds=3)
    found = {courses.OURS: _run(4_000_000, 2.0), courses.REFERENCE: "did not finish in 600 s"}
    said = (
        "100,000 devices, one in 20 active, messages per CPU second: ours 2,000,000; "
        "scala-flat-map-groups did not finish in 600 s"
    )
    assert round_line(course, 0, 3, found) == f"round 0 of 3 (warm-up), {said}"
    assert round_line(course, 1, 3, found) == f"round 1 of 3, {said}"


@dataclass
class _Process:
    """Stands for a warm process."""

    outcome: Run | Exception
    ended: bool = False

    def run(self, *_: object) -> Run:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def end(self) -> None:
        self.ended = True


def _one_round(processes: dict[str, Any]) -> dict[str, Run | str]:
    course = courses.Workload(Fleet(1_000, 6), tuple(processes))
    plan = courses.Plan((course,), limit_s=600)
    return _round(course, Input(course.fleet, Path(), (1, 1), 0), 1, (plan, Path(), processes, set()))


def test_a_peer_that_fails_is_a_row_that_says_why_and_the_others_run() -> None:
    failing, slow = _Process(Crashed("scala-transform-with-state failed: why\nits log")), _Process(DidNotFinish())
    processes = {courses.FAST[2]: failing, courses.PER_DEVICE[0]: slow, courses.OURS: _Process(_run(4_000_000, 2.0))}
    found = _one_round(processes)
    assert found[courses.FAST[2]] == "did not finish: scala-transform-with-state failed: why\nits log"
    assert found[courses.PER_DEVICE[0]] == "did not finish in 600 s"
    assert isinstance(found[courses.OURS], Run)
    assert failing.ended and list(processes) == [courses.OURS], "each further course starts it anew"


@pytest.mark.parametrize("name", [courses.OURS, courses.REFERENCE])
@pytest.mark.parametrize(
    ("error", "said"), [(Crashed("it failed: why"), "failed: why"), (DidNotFinish(), "did not finish in 600 s")]
)
def test_without_ours_or_the_reference_the_benchmark_ends(name: str, error: Exception, said: str) -> None:
    with refused("contender-unfinished", match=said):
        _one_round({name: _Process(error)})


def test_an_input_in_which_nobody_falls_silent_is_no_comparison(tmp_path: Path) -> None:
    line = dict.fromkeys(COLUMNS, 1) | {"device_id": "a", "from_mode": "provisioned", "to_mode": "online"}
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        lines = [json.dumps(line | {"trigger": trigger}) for trigger in ("signal", "errors")]
        (tmp_path / name / "said.json").write_text("\n".join(lines))
    found = {name: replace(_run(1, 1.0), out=tmp_path / name) for name in ("one", "other")}
    source = Input(Fleet(1_000, 6), Path(), (1, 1), 100_000)
    with refused("contenders-compare-nothing"):
        _require_equal(found, source, 1)


def test_a_contender_that_a_plan_does_not_run_is_refused_by_name() -> None:
    with refused("contender-not-planned", Misuse):
        courses.planned(courses.QUICK, ()).restricted([courses.OURS, "python-apply-in-pandas"])


@pytest.mark.parametrize("batches", [2, 3, 6])
def test_an_input_is_long_enough_for_devices_to_fall_silent(batches: int, tmp_path: Path) -> None:
    source = prepare(Fleet(2_000, 6, batches=batches), tmp_path)
    rows = DeltaTable(str(source.path)).to_pyarrow_table(columns=["device_id", "kind", "event_time"])
    heard = rows.filter(pc.field("kind") != "policy").group_by("device_id").aggregate([("event_time", "max")])
    last_ms = heard["event_time_max"].cast("int64").to_numpy() // 1000
    silent = last_ms + source.fleet.timeout_ms <= source.judged_to_ms
    assert 10 <= silent.sum() <= 30, "half of one in fifty never come back"
