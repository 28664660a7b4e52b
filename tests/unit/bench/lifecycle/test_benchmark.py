"""Benchmark of the lifecycle job and its peers: rows, notes, comparisons and refused sizes."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from bench.lifecycle import plans
from bench.lifecycle.benchmark import _require_equal, _round, cost_by_size, figures, json_line, python_ratios, round_line
from bench.lifecycle.compare import COLUMNS
from bench.lifecycle.generate import Fleet, Input, prepare
from bench.lifecycle.harness import Crashed, DidNotFinish, Run
from fleetpulse.core.errors import Misuse
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def _run(messages: int, cpu_s: float) -> Run:
    return Run(messages, cpu_s, cpu_s, [1_000, 2_000], 10**9, 10**6, Path())


def test_results_that_were_not_compared_are_not_reported_as_equal() -> None:
    [workload, *_] = plans.PLANS[plans.QUICK](()).workloads
    runs = {(0, plans.OURS): [_run(4_000_000, 2.0)], (0, plans.REFERENCE): [_run(4_000_000, 4.0), _run(4_000_000, 5.0)]}
    alone = figures(workload, plans.OURS, {(0, plans.OURS): runs[0, plans.OURS]}, 0, None, compared=False)
    assert (alone["equal"], alone["ratio"]) == (None, None)
    compared = figures(workload, plans.OURS, runs, 0, None, compared=True)
    assert (compared["equal"], compared["ratio"]) == (True, 2.0), "relative to the best round of the reference"
    absent = figures(workload, plans.OURS, runs, 0, "did not finish in 600 s", compared=True)
    assert (absent["equal"], absent["messages_per_cpu_s"]) == (None, None)


KEYS = [
    "contender", "devices", "active", "messages_per_cpu_s", "messages_per_s", "batch_p50_ms", "batch_p95_ms",
    "checkpoint_bytes_per_device", "peak_rss_mb", "ratio", "equal",
]  # fmt: skip


def test_json_lines_have_equal_keys_and_an_optional_note() -> None:
    [workload, *_] = plans.PLANS[plans.QUICK](()).workloads
    runs = {(0, plans.OURS): [_run(4_000_000, 2.0)], (0, plans.REFERENCE): [_run(4_000_000, 4.0)]}
    ran = json.loads(json_line(figures(workload, plans.OURS, runs, 0, None, compared=True)))
    assert list(ran) == KEYS and None not in ran.values()
    absent = json.loads(json_line(figures(workload, plans.OURS, {}, 0, "did not finish in 600 s", compared=True)))
    assert list(absent) == [*KEYS, "note"]
    assert absent["note"] == "did not finish in 600 s"


@pytest.mark.parametrize("plan", plans.PLANS)
def test_contender_devices_and_active_share_identify_a_row(plan: str) -> None:
    rows = [figures(workload, name, {}, place, None, compared=False)
            for place, workload in enumerate(plans.PLANS[plan](()).workloads) for name in workload.contenders]  # fmt: skip
    named = [(row["contender"], row["devices"], row["active"]) for row in rows if row["shown"]]
    assert len(set(named)) == len(named)
    if plan == plans.FULL:
        assert {(name, size, active) for name in plans.FAST for size in plans.SIZES for active in (1.0, 0.05)} <= {*named}
        assert {(name, 100_000, 1.0) for name in plans.PER_DEVICE} <= {*named}


def test_contenders_with_rows_elsewhere_do_not_form_a_course_alone() -> None:
    full = plans.PLANS[plans.FULL](())
    assert len(full.restricted([plans.OURS, plans.REFERENCE]).workloads) == len(full.workloads) - 1
    assert len(full.restricted([plans.OURS, plans.PER_DEVICE[0]]).workloads) == len(full.workloads)


def test_cost_by_size_compares_the_cheapest_and_the_most_expensive_size() -> None:
    costs = {10_000: 800_000, 100_000: 1_000_000, 1_000_000: 900_000}
    rows = [{"contender": "ours", "devices": size, "messages_per_cpu_s": rate} for size, rate in costs.items()]
    assert cost_by_size(rows) == [
        "ours: a message costs 1.00 us of CPU at 100,000 devices and 1.25 us at 10,000: 25% between them"
    ]


def test_python_ratios_are_multiples_over_the_same_input() -> None:
    rates = [("ours", 10_000, 60_000), ("python-transform-with-state", 10_000, 6_000), ("ours", 100_000, 600_000),
            ("scala-flat-map-groups", 100_000, 250_000), ("python-transform-with-state", 100_000, 15_000),
            ("pyflink-keyed-process", 100_000, None)]  # fmt: skip
    rows = [{"contender": name, "devices": size, "messages_per_cpu_s": rate} for name, size, rate in rates]
    assert python_ratios(rows) == [
        "10,000 devices: 10.0 times the messages per CPU second of python-transform-with-state",
        "100,000 devices: 40.0 times the messages per CPU second of python-transform-with-state",
    ]


@pytest.mark.parametrize(("plan", "devices"), [(plans.QUICK, 10), (plans.FLAT, 7_000_000), (plans.FLAT, 100)])
def test_a_size_that_cannot_be_generated_is_refused(plan: str, devices: int) -> None:
    with refused("bench-input-invalid", Misuse):
        plans.PLANS[plan]([devices])


def test_only_the_flat_plan_accepts_another_batch_size() -> None:
    fleets = [workload.fleet for workload in plans.planned(plans.FLAT, [10_000, 1_000_000], 3_000_000).workloads]
    assert fleets == [Fleet(10_000, 300, batches=3), Fleet(1_000_000, 3, batches=3)]
    assert plans.planned(plans.FLAT, ()) == plans.planned(plans.FLAT, (), plans.FLAT_ROWS)
    with refused("bench-input-invalid", Misuse):
        plans.planned(plans.FLAT, [1_000_000], 999_999)
    for plan in plans.PLANS.keys() - {plans.FLAT}:
        with refused("option-conflict", Misuse):
            plans.planned(plan, (), 3_000_000)


def test_every_contender_runs_in_the_full_benchmark_at_the_smaller_size() -> None:
    full = plans.PLANS[plans.FULL](())
    assert {*full.contenders} == {*plans.ALL}
    at_the_bar = [workload for workload in full.workloads if workload.fleet == Fleet(100_000, 12, batches=2)]
    assert {*plans.PER_DEVICE, plans.OURS} <= {name for workload in at_the_bar for name in workload.contenders}


def test_each_round_has_a_line_with_its_results() -> None:
    workload = plans.Workload(Fleet(100_000, 12, one_in=20), (plans.OURS, plans.REFERENCE), rounds=3)
    found = {plans.OURS: _run(4_000_000, 2.0), plans.REFERENCE: "did not finish in 600 s"}
    results = (
        "100,000 devices, one in 20 active, messages per CPU second: ours 2,000,000; "
        "scala-flat-map-groups did not finish in 600 s"
    )
    assert round_line(workload, 0, 3, found) == f"round 0 of 3 (warm-up), {results}"
    assert round_line(workload, 1, 3, found) == f"round 1 of 3, {results}"


@dataclass
class _Process:
    """Fake warm process with a given outcome."""

    outcome: Run | Exception
    ended: bool = False

    def run(self, *_: object) -> Run:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def end(self) -> None:
        self.ended = True


def _one_round(processes: dict[str, Any]) -> dict[str, Run | str]:
    workload = plans.Workload(Fleet(1_000, 6), tuple(processes))
    plan = plans.Plan((workload,), limit_s=600)
    return _round(workload, Input(workload.fleet, Path(), (1, 1), 0), 1, (plan, Path(), processes, set()))


def test_a_failed_peer_has_a_row_with_the_reason_and_the_others_continue() -> None:
    failing, slow = _Process(Crashed("scala-transform-with-state failed: why\nits log")), _Process(DidNotFinish())
    processes = {plans.FAST[2]: failing, plans.PER_DEVICE[0]: slow, plans.OURS: _Process(_run(4_000_000, 2.0))}
    found = _one_round(processes)
    assert found[plans.FAST[2]] == "did not finish: scala-transform-with-state failed: why\nits log"
    assert found[plans.PER_DEVICE[0]] == "did not finish in 600 s"
    assert isinstance(found[plans.OURS], Run)
    assert failing.ended and list(processes) == [plans.OURS], "the next workload starts it again"


@pytest.mark.parametrize("name", [plans.OURS, plans.REFERENCE])
@pytest.mark.parametrize(
    ("error", "message"), [(Crashed("it failed: why"), "failed: why"), (DidNotFinish(), "did not finish in 600 s")]
)
def test_a_failure_of_this_job_or_the_reference_ends_the_benchmark(name: str, error: Exception, message: str) -> None:
    with refused("contender-unfinished", match=message):
        _one_round({name: _Process(error)})


def test_an_input_without_silent_devices_is_refused_as_a_comparison(tmp_path: Path) -> None:
    line = dict.fromkeys(COLUMNS, 1) | {"device_id": "a", "from_mode": "provisioned", "to_mode": "online"}
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        lines = [json.dumps(line | {"trigger": trigger}) for trigger in ("signal", "errors")]
        (tmp_path / name / "emitted.json").write_text("\n".join(lines))
    found = {name: replace(_run(1, 1.0), out=tmp_path / name) for name in ("one", "other")}
    source = Input(Fleet(1_000, 6), Path(), (1, 1), 100_000)
    with refused("contenders-compare-nothing"):
        _require_equal(found, source, 1)


def test_a_contender_that_is_not_in_the_plan_is_refused() -> None:
    with refused("contender-not-planned", Misuse):
        plans.planned(plans.QUICK, ()).restricted([plans.OURS, "python-apply-in-pandas"])


@pytest.mark.parametrize("batches", [2, 3, 6])
def test_an_input_is_long_enough_for_devices_to_fall_silent(batches: int, tmp_path: Path) -> None:
    source = prepare(Fleet(2_000, 6, batches=batches), tmp_path)
    rows = DeltaTable(str(source.path)).to_pyarrow_table(columns=["device_id", "kind", "event_time"])
    newest = rows.filter(pc.field("kind") != "policy").group_by("device_id").aggregate([("event_time", "max")])
    last_ms = newest["event_time_max"].cast("int64").to_numpy() // 1000
    silent = last_ms + source.fleet.timeout_ms <= source.judged_to_ms
    assert 10 <= silent.sum() <= 30, "one in fifty devices falls silent; half of these never return"
