"""Benchmark of numbers of cores: parts of batches, arithmetic of the model, marked rows, refusals."""

from pathlib import Path
from typing import Any

import pytest

from bench.lifecycle.batch_parts import BatchParts, Stage, parts_of
from bench.lifecycle.contenders import OURS, key_groups, named, split_name
from bench.lifecycle.cores import cores_plan, measured_rows, model_of, model_rows
from bench.lifecycle.generate import Fleet
from bench.lifecycle.harness import Run
from bench.lifecycle.scaling_model import ScalingModel
from cli.dev.commands import bench_lifecycle
from fleetpulse.planning.partition_skew import busiest
from tests.support.refusals import refused

pytestmark = pytest.mark.unit

AT = "2026-11-27T12:00:00.000Z"
AT_MS = 1_795_780_800_000
FLEET = Fleet(100_000, 12, batches=4)


def _parts(run_ms: float, tasks: int = 2, serial_ms: float = 300) -> BatchParts:
    """Return a batch whose two stages have equal work, evenly divided among their tasks."""
    stage_ms = run_ms / tasks
    return BatchParts(serial_ms + 2 * stage_ms, serial_ms / 3, serial_ms / 3, serial_ms / 3,
                      stage_ms, run_ms, tasks, stage_ms, run_ms, tasks)  # fmt: skip


def _model() -> ScalingModel:
    """Return a model of 300 ms serial, 20 ms for each task, and 1,000 ms of divisible work per stage."""
    return ScalingModel.measured(100_000, 1_200_000, 2, [_parts(1_040)] * 3, [_parts(40)] * 3)


def test_parts_of_a_batch_add_up_and_stages_belong_to_the_batch_in_which_they_began() -> None:
    took = {"triggerExecution": 1_000, "latestOffset": 10, "queryPlanning": 40, "walCommit": 20, "commitOffsets": 30,
            "addBatch": 890}  # fmt: skip
    batches: list[dict[str, Any]] = [{"timestamp": AT, "durationMs": took}]
    reading, folding = Stage(AT_MS + 100, AT_MS + 300, 390, 2, reads=True), Stage(AT_MS + 300, AT_MS + 900, 1_100, 2, reads=False)
    later = Stage(AT_MS + 1_100, AT_MS + 1_200, 90, 2, reads=True)
    [parts] = parts_of(batches, [later, folding, reading])
    assert parts == BatchParts(1_000, 50, 50, 100, 200, 390, 2, 600, 1_100, 2)
    assert parts.driver_ms + parts.read_ms + parts.fold_ms == parts.batch_ms


def test_model_divides_the_work_and_keeps_the_serial_parts() -> None:
    model = _model()
    assert (model.read_task_ms, model.fold_task_ms) == (20, 20)
    assert model.batch_ms(1) == 300 + 2 * (20 + 1_000)
    assert model.read_ms(32) == 20 + 1_000 / 32
    assert model.fold_ms(32) == pytest.approx(20 + 1_000 / 32 * busiest(key_groups(100_000, 32), 32))
    assert model.batch_ms(2) == pytest.approx(_parts(1_040).batch_ms), "it repeats the measurement if partitions are balanced"
    assert model.read_ms(1_000) == 20 + 1_000 / 60, "a task has 20,000 rows"
    assert model.limit == (300 + 2 * 1_020) / (300 + 40)
    assert all(model.batch_ms(1) / model.batch_ms(cores) < model.limit for cores in (2, 8, 32, 128, 1_000))


def test_fixed_work_of_a_task_is_never_more_than_its_work() -> None:
    model = ScalingModel.measured(100_000, 1_200_000, 2, [_parts(40)], [_parts(60)])
    assert model.batch_ms(1) == model.batch_ms(128) == 300 + 2 * 20


def _run(cpu_s: float, wall_s: float) -> Run:
    return Run(3_600_000, wall_s, cpu_s, [], 10**9, 10**6, Path(), (_parts(1_040),) * 3)


def test_rows_show_wall_and_cpu_time_and_mark_the_model() -> None:
    runs = {1: [_run(9.0, 9.0), _run(9.9, 9.9), _run(8.1, 8.1)], 2: [_run(9.9, 5.0)] * 3}
    measured = measured_rows(FLEET, runs)
    assert [(row["kind"], row["cores"], row["speed_up"], row["equal"]) for row in measured] == [
        ("measured", 1, 1.0, True),
        ("measured", 2, 1.8, True),
    ]
    assert [(row["wall_s_per_million"], row["cpu_s_per_million"]) for row in measured] == [(2.5, 2.5), (1.389, 2.75)]
    modelled = model_rows(model_of(FLEET, runs, {cores: [_run(1, 1)] for cores in runs}))
    assert {row["kind"] for row in modelled} == {"model"}
    assert [row["cores"] for row in modelled] == [1, 2, 8, 32, 128]
    assert all(row["cpu_s_per_million"] is None and row["equal"] is None for row in modelled)
    assert measured_rows(FLEET, {2: runs[2]})[0]["equal"] is None, "nothing was compared"


def test_number_of_cores_is_part_of_the_name() -> None:
    assert split_name(named(OURS, 16)) == (OURS, 16)
    assert split_name(OURS) == (OURS, None)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1;2", "3", "-1", "one", "1,٢"])
def test_numbers_of_cores_that_the_machine_lacks_are_refused(text: str) -> None:
    with refused("bench-cores-invalid"):
        cores_plan(text, available=2)


def test_plan_has_each_number_once_and_enough_files_for_all_cores() -> None:
    plan = cores_plan("2, 1,2", available=16)
    assert plan.cores == (1, 2) and plan.fleet.files == 16
    assert cores_plan("16", 1_000_000, available=16).fleet.devices == 1_000_000
    assert cores_plan("1", small=True, available=2).fleet.devices == 5_000


def test_options_of_other_plans_are_refused_with_cores() -> None:
    with refused("option-conflict"):
        bench_lifecycle(cores="1", flat=True)
    with refused("option-conflict"):
        bench_lifecycle(cores="1", devices=[10, 20])
