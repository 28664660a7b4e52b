"""Plan of a test run: selection, parts and their order, estimates and printed lines."""

import re

import pytest

from cli.dev.test_plan import (
    APART,
    LAYERS,
    SLOW_PACE,
    Budget,
    Durations,
    Finished,
    Form,
    Part,
    budget_of,
    choose,
    closing,
    fits_in,
    further_jobs,
    in_order,
    left_out_by_time,
    next_part,
    pace_of,
    part_left_s,
    parts_of,
    progress,
    skips,
    slowest,
    span,
    split,
    time_left_s,
    usual_jobs,
    wholly_extended,
)
from fleetpulse.core.errors import Misuse
from fleetpulse.paths import ROOT
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
FILES = {
    "unit": [f"tests/unit/test_{name}.py" for name in "abcdef"],
    "property": ["tests/property/test_p.py"],
    "dags": ["tests/dags/test_q.py", "tests/dags/test_r.py"],
    "spark": ["tests/spark/test_s.py", "tests/spark/test_t.py", "tests/spark/test_u.py"],
    "e2e": ["tests/e2e/test_v.py", "tests/e2e/test_w.py"],
}
SECONDS = {
    "tests/unit/test_a.py": 100.0,
    "tests/spark/test_s.py": 100.0,
    "tests/spark/test_t.py": 60.0,
    "tests/spark/test_u.py": 50.0,
    "tests/e2e/test_w.py": 300.0,
}


def estimate(path: str) -> float:
    return SECONDS.get(path, 10.0)


def test_layers_keep_their_order_and_options_are_passed_to_pytest() -> None:
    assert choose([], Form.DEFAULT).layers == LAYERS
    chosen = choose(["spark", "unit", "-k", "e2e"], Form.ALL)
    assert (chosen.layers, chosen.rest, chosen.targets) == (("unit", "spark"), ("-k", "e2e"), ())
    with refused("test-layer-unknown", Misuse):
        choose(["units"], Form.DEFAULT)


@pytest.mark.parametrize("arguments", [["tests/unit/test_a.py::test_x", "-v"], ["-v", "tests/unit/test_a.py::test_x"]])
def test_a_path_selects_its_layer_and_excludes_no_test(arguments: list[str]) -> None:
    chosen = choose(arguments, Form.DEFAULT)
    assert (chosen.layers, chosen.targets, chosen.rest) == (("unit",), ("tests/unit/test_a.py::test_x",), ("-v",))
    assert chosen.expression() is None


def test_the_folder_of_a_layer_selects_the_layer() -> None:
    chosen = choose(["tests/dags", "tests/spark/test_s.py"], Form.DEFAULT)
    assert (chosen.layers, chosen.targets) == (("dags", "spark"), ("tests/spark/test_s.py",))


def test_a_path_that_is_the_value_of_an_option_selects_nothing() -> None:
    chosen = choose(["--deselect", "tests/unit/test_a.py::test_x"], Form.DEFAULT)
    assert (chosen.targets, chosen.rest) == ((), ("--deselect", "tests/unit/test_a.py::test_x"))


@pytest.mark.parametrize(("arguments", "jobs"), [(["-n", "0"], 1), (["-n1"], 1), (["--numprocesses=3"], 3), (["-k", "x"], None)])
def test_an_option_sets_the_number_of_parts_at_a_time(arguments: list[str], jobs: int | None) -> None:
    assert choose(arguments, Form.DEFAULT).jobs == jobs


@pytest.mark.parametrize("arguments", [["-n"], ["-n", "auto"], ["-m"]])
def test_an_option_without_a_valid_value_is_refused(arguments: list[str]) -> None:
    with refused("option-invalid", Misuse):
        choose(arguments, Form.DEFAULT)


@pytest.mark.parametrize(
    ("arguments", "form", "expression"),
    [
        ([], Form.DEFAULT, "not extended"),
        (["-m", "e2e or spark"], Form.DEFAULT, "(e2e or spark) and not extended"),
        (["-me2e"], Form.DEFAULT, "(e2e) and not extended"),
        ([], Form.ALL, None),
        (["-m", "e2e"], Form.LONG, "e2e"),
    ],
)
def test_the_default_suite_excludes_extended_tests(arguments: list[str], form: Form, expression: str | None) -> None:
    assert choose(arguments, form).expression() == expression


@pytest.mark.parametrize(
    ("arguments", "whole"), [([], True), (["-n", "0"], True), (["unit"], False), (["-k", "x"], False), (["-x"], False)]
)
def test_a_run_without_layers_and_pytest_options_is_a_whole_suite(arguments: list[str], whole: bool) -> None:
    assert choose(arguments, Form.ALL).whole is whole


@pytest.mark.parametrize(
    ("option", "interactive"), [("-s", True), ("-vs", True), ("--pdb", True), ("--co", True), ("-rs", False)]
)
def test_options_that_need_the_terminal_make_a_run_interactive(option: str, interactive: bool) -> None:
    assert choose([option], Form.DEFAULT).interactive is interactive


def test_files_are_split_evenly_and_each_is_in_one_group() -> None:
    groups = split(FILES["spark"], 2, estimate)
    assert sorted(groups) == [("tests/spark/test_s.py",), ("tests/spark/test_t.py", "tests/spark/test_u.py")]
    assert split(["x"], 5, estimate) == [("x",)]


def test_the_longest_part_starts_first_and_each_file_is_in_one_part() -> None:
    parts = parts_of(FILES, choose([], Form.ALL), estimate, 2)
    assert [part.estimate_s for part in parts] == sorted((part.estimate_s for part in parts), reverse=True)
    assert [part.label for part in parts[:2]] == ["e2e/test_w.py", "spark 2 of 2"]
    assert sorted(path for part in parts for path in part.targets) == sorted(path for paths in FILES.values() for path in paths)
    assert [part.targets for part in parts if part.label == "dags"] == [tuple(FILES["dags"])]
    assert ("tests/unit/test_a.py",) in [part.targets for part in parts], "a long file is a separate part"


def test_short_end_to_end_files_share_a_part() -> None:
    files = {"e2e": ["tests/e2e/test_v.py", "tests/e2e/test_w.py", "tests/e2e/test_x.py"]}
    parts = parts_of(files, choose([], Form.ALL), lambda path: 41.0 if path.endswith("_w.py") else 5.0, 2)
    assert {part.targets for part in parts} == {("tests/e2e/test_w.py",), ("tests/e2e/test_v.py", "tests/e2e/test_x.py")}


def test_a_narrowed_run_has_few_parts_and_an_interactive_run_one_per_layer() -> None:
    narrowed = parts_of(FILES, choose(["-k", "x"], Form.ALL), estimate, 2)
    assert len(narrowed) == 8
    interactive = parts_of(FILES, choose(["--co"], Form.ALL), estimate, 1)
    assert [part.targets for part in interactive] == [tuple(FILES[layer]) for layer in LAYERS]


def test_parts_that_need_a_core_never_run_at_the_same_time() -> None:
    parts = parts_of({"e2e": [*APART, "tests/e2e/test_v.py"]}, choose([], Form.ALL), estimate, 2)
    apart = [part for part in parts if part.apart]
    assert len(apart) == 2
    assert next_part([apart[1], parts[-1]], [apart[0]]) == next(part for part in [apart[1], parts[-1]] if not part.apart)
    assert next_part([apart[1]], [apart[0]]) is None
    assert next_part([apart[1]], []) == apart[1]


def test_with_a_time_limit_extended_files_are_optional_parts_of_their_own() -> None:
    optional = {"tests/e2e/test_w.py", "tests/spark/test_t.py"}
    parts = parts_of(FILES, choose([], Form.ALL, 600.0), estimate, 2, optional)
    assert {path for part in parts if part.optional for path in part.targets} == optional
    assert sorted(path for part in parts for path in part.targets) == sorted(path for paths in FILES.values() for path in paths)
    assert not any(part.optional for part in parts_of(FILES, choose([], Form.ALL), estimate, 2))
    with refused("option-conflict", match="--within needs --all or --long"):
        choose([], Form.DEFAULT, 600.0)


def test_an_optional_part_starts_only_if_all_required_parts_end_in_time_beside_it() -> None:
    required, optional = Part("r", (), 100.0), Part("o", (), 40.0, optional=True)
    assert fits_in(required, [required], [500.0], 1, 1.0, 0.0), "a required part always starts"
    assert fits_in(optional, [optional, required], [60.0], 2, 1.0, 140.0)
    assert not fits_in(optional, [optional, required], [61.0], 1, 1.0, 200.0)
    assert not fits_in(optional, [optional], [], 2, 2.0, 79.0)
    assert fits_in(optional, [optional], [], 2, 2.0, 80.0)
    assert next_part([optional, required], [], lambda part: not part.optional) == required
    assert next_part([optional], [], lambda part: not part.optional) is None


def test_optional_parts_start_last_on_a_slow_machine_only() -> None:
    parts = [Part("a", (), 9.0, optional=True), Part("b", (), 8.0), Part("c", (), 7.0, optional=True), Part("d", (), 6.0)]
    assert in_order(parts, 1.0) == parts
    assert [part.label for part in in_order(parts, SLOW_PACE + 0.1)] == ["b", "d", "a", "c"]


def test_the_pace_changes_from_that_of_the_machine_to_that_of_the_ended_parts() -> None:
    assert pace_of([], 1.5) == 1.5
    assert pace_of([], 0.5) == 1.0
    assert pace_of([(300.0, 900.0)], 1.0) == 2.0
    assert pace_of([(3000.0, 9000.0)] * 10, 1.0) == pytest.approx(3.0, abs=0.03)


def test_parts_that_a_time_limit_leaves_out_are_listed_with_the_command_that_runs_them() -> None:
    assert left_out_by_time(Form.ALL, [], [], 60.0) == []
    late = [Part("e2e/test_a.py", ("tests/e2e/test_a.py",), 1)]
    lines = left_out_by_time(Form.LONG, late, [Part("b", ("b.py", "c.py"), 1)], 75.0)
    assert lines == [
        "== the time limit of 1 min 15 s leaves out 2 parts with extended tests only; to run them: ./fleet test --long "
        "tests/e2e/test_a.py b.py c.py",
        "   not started: e2e/test_a.py",
        "   stopped: b",
    ]


def test_the_time_left_is_that_of_the_last_core_to_finish() -> None:
    assert time_left_s([], [], 2) == 0
    assert time_left_s([30.0, 10.0], [], 2) == 30
    assert time_left_s([30.0, 10.0], [25.0, 5.0], 2) == 35
    assert time_left_s([], [10.0, 10.0], 1) == 20


def test_the_time_left_of_an_overdue_part_follows_from_its_ended_tests() -> None:
    assert part_left_s(100, 40, 1, 50) == 60
    assert part_left_s(100, 99, 0, 0) == 5
    assert part_left_s(100, 150, 30, 40) == 50
    assert part_left_s(100, 150, 0, 40) == 5


def test_durations_are_the_median_of_the_last_five_runs() -> None:
    durations = Durations()
    for seconds in (100, 1, 2, 3, 40, 50):
        durations.add(Form.ALL, "tests/unit/test_a.py::test_x[1::2]", seconds, seconds / 2)
    assert durations.of_test(Form.ALL, "tests/unit/test_a.py::test_x[1::2]") == 3
    assert durations.of_test(Form.DEFAULT, "tests/unit/test_a.py::test_x[1::2]") is None
    assert durations.estimate(Form.ALL)("tests/unit/test_a.py") == 3
    assert durations.tests_of(Form.ALL) == {"tests/unit/test_a.py": 1}
    assert Durations(durations.recorded()).estimate(Form.ALL)("tests/unit/test_a.py") == 3
    durations.forget(Form.ALL, "tests/unit/test_a.py", ["tests/unit/test_a.py::test_y"])
    assert durations.tests_of(Form.ALL) == {}


def test_a_file_without_a_record_is_estimated_by_its_layer() -> None:
    estimate_of = Durations().estimate(Form.ALL)
    assert (
        estimate_of("tests/e2e/test_new.py") > estimate_of("tests/spark/test_new.py") > estimate_of("tests/unit/test_new.py") > 0
    )


def test_files_with_extended_tests_only_are_recognised_without_pytest() -> None:
    assert wholly_extended("import pytest\npytestmark = [pytest.mark.e2e, pytest.mark.extended]\n")
    assert not wholly_extended("import pytest\npytestmark = pytest.mark.e2e\n@pytest.mark.extended\ndef test_x(): ...\n")


def test_contributing_lists_the_files_with_extended_tests_only() -> None:
    files = (path for path in (ROOT / "tests").rglob("test_*.py") if wholly_extended(path.read_text()))
    marked = {str(path.relative_to(ROOT).with_suffix("")) for path in files}
    rows = re.findall(r"^\| `(tests/[\w/]+)` \| whole files: (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert marked == {f"{folder}/{name}" for folder, names in rows for name in re.findall(r"test_\w+", names)}


def test_an_exceeded_budget_is_reported_with_a_remedy() -> None:
    pyproject = {"tool": {"fleet": {"test-budget": {"default": {"spark_starts": 10, "cpu_units": 100}}}}}
    budget = budget_of(pyproject, Form.DEFAULT)
    assert budget is not None and budget == Budget(10, 100.0)
    assert budget_of(pyproject, Form.LONG) is None
    assert budget.faults(Form.DEFAULT, 10, 100.0) == []
    starts, units = budget.faults(Form.DEFAULT, 11, 100.5)
    assert starts.startswith("the default suite started Spark 11 times; its budget is 10; find the new cold start")
    assert "cpu_units in [tool.fleet.test-budget.default] of pyproject.toml" in units


def test_the_progress_line_has_counts_times_and_running_parts() -> None:
    running = [("e2e/test_state.py", 41.0, 95.0), ("unit 2 of 6", 12.0, 60.0)]
    assert progress(312, 1980, 250, 170, running) == (
        "== 312 of 1,980 tests, 4 min 10 s gone, about 3 min left; "
        "now: e2e/test_state.py (41 s of about 1 min 35 s), unit 2 of 6 (12 s of about 1 min 0 s)"
    )
    assert progress(0, 0, 0, 12, []) == "== 0 of 0 tests, 0 s gone, about 20 s left"
    assert span(59.6) == "1 min 0 s"


def test_results_list_the_slowest_tests_and_the_reasons_of_skips() -> None:
    finished = [
        Finished("a", "passed", 1.0, 2.0),
        Finished("b", "passed", 3.0, 1.5, 2),
        Finished("c", "skipped", reason="no broker"),
        Finished("d", "skipped", reason="no broker"),
        Finished("e", "failed"),
    ]
    first, second = slowest(finished, {"a": 0.5}.get, 2)
    assert first.strip() == "3.0 s (new), 1.5 CPU s, 2 starts of Spark  b"
    assert second.strip() == "1.0 s (usually 0.5 s), 2.0 CPU s  a"
    assert skips(finished) == ["   2 skipped: no broker"]
    assert closing(finished) == "2 passed, 1 failed, 2 skipped"
    assert closing(finished, broken=1) == "2 passed, 2 failed, 2 skipped"


def test_the_label_of_a_part_with_one_file_is_the_file() -> None:
    assert parts_of({"e2e": ["tests/e2e/test_v.py"]}, choose(["e2e"], Form.ALL), estimate, 2) == [
        Part("e2e/test_v.py", ("tests/e2e/test_v.py",), 14.0)
    ]


def test_unmeasured_long_files_have_long_estimates() -> None:
    in_full, in_default = (Durations().estimate(form) for form in (Form.ALL, Form.DEFAULT))
    for estimate_of in (in_full, in_default):
        assert estimate_of("tests/e2e/operations/test_airflow.py") >= 4 * estimate_of("tests/e2e/ingest/test_access.py")
    assert in_full("tests/e2e/operations/test_airflow.py") > 3 * in_default("tests/e2e/operations/test_airflow.py")


def test_the_full_suite_runs_more_parts_while_cores_are_idle() -> None:
    assert [usual_jobs(cores) for cores in (1, 2, 8)] == [1, 2, 2]
    assert further_jobs(Form.ALL) > further_jobs(Form.DEFAULT)
