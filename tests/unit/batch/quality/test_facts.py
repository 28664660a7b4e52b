"""Reference facts of the quality suites: chosen devices, positions, origins of replays, floors."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from batch.amend import AmendRequest, amend_home
from batch.common.progress import ReportProgress
from batch.quality.derived_tables import snapshot_state
from batch.quality.facts import by_bronze, has_same_coverage, heads_of, is_chosen, position_from
from batch.quality.rejudge import Origin, origin_of, replay_bronze
from batch.quality.run import gate, refuse, run
from batch.state.generation import GenerationSpec, require_emitted, starts_from_current
from fleetpulse.columnar.snapshot.rows import GROUP
from fleetpulse.core.policy import Policies, parse_policy
from fleetpulse.core.presence.coverage import Coverage, ShardProgress
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import Deployment, outcome, replay
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.io.checkpoints.checkpoint import CheckpointPosition
from fleetpulse.io.checkpoints.generations import DISCARDED, RETIRED, Generation, Generations, save_generations
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import raise_floor
from fleetpulse.io.quality.great_expectations import Expectations
from fleetpulse.io.quality.suite_inputs import opened
from fleetpulse.io.tables import tables as delta
from tests.support.histories.floods import summed
from tests.support.histories.histories import START, positioned, row, signal
from tests.support.homes.homes import apply_retention, commit_batch, empty, land
from tests.support.homes.quality import (
    NAMED,
    eventful_history,
    failed_expectations,
    flooded,
    judged_home,
    opened_tables,
    plant,
    state_rows,
    write_state,
)
from tests.support.refusals import refused

pytestmark = [
    pytest.mark.unit,
    pytest.mark.timeout(600),  # importing Great Expectations takes seconds
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from Great Expectations
]
DEPLOYMENT = Deployment(30_000, 20_000)
SEED = 7
DAY_MS = 86_400_000


def generations_from(*sources: dict[str, Any]) -> Generations:
    """Return a record of retired generations, one for each source."""
    known = {number: Generation(number, 4, 1, "verb", source, status=RETIRED) for number, source in enumerate(sources, 1)}
    return Generations(len(sources), known)


def failures_in(home: Home, suite: str, *changes: tuple[str, str]) -> dict[str, int]:
    """Return the failed rows by expectation of a suite, after changes of the opened tables."""
    with opened_tables(home) as (tables, derived):
        derived.make(NAMED[suite])
        for name, sql in changes:
            plant(tables, name, sql)
        rows = tables.frame(NAMED[suite].rows)
        results = Expectations(home.path / "aside", "planted").evaluate(NAMED[suite], rows)
    assert [one.fault for one in results if one.fault] == []
    return {one.expectation.name: one.failed for one in results if one.failed}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return judged_home(tmp_path_factory.mktemp("clean") / "home", eventful_history(SEED), DEPLOYMENT)


def test_generation_has_chosen_devices_if_it_or_an_earlier_one_was_made_so() -> None:
    sources = ({}, {"snapshot": 3, "generation": 1, "only": "site = 'a'"}, {"generation": 2, "batch": 7}, {"generation": 3})
    assert [is_chosen(generations_from(*sources), number) for number in (1, 2, 3, 4)] == [False, True, True, True]
    listed = ({}, {"devices": "the registry", "generation": 1}, {"snapshot": 9, "generation": 2, "only": None})
    assert is_chosen(generations_from(*listed), 3)
    rolled_back = generations_from(*sources, {"generation": 1, "batch": 2})
    assert is_chosen(rolled_back, 5), "generations with chosen devices were current before it"
    with_discarded = {
        number: replace(one, status=DISCARDED) if 1 < number < 5 else one for number, one in rolled_back.known.items()
    }
    assert not is_chosen(Generations(5, with_discarded), 5)


def test_device_from_a_list_may_emit_transition_two_first(clean: Home) -> None:
    change = """UPDATE judgements SET device_id = 'listed', transition_no = 2, from_mode = 'offline'
                 WHERE device_id || life || transition_no = (SELECT min(device_id || life || transition_no) FROM judgements
                                                             WHERE kind = 'transition' AND transition_no = 1)"""
    others_removed = "DELETE FROM judgements WHERE device_id <> 'listed'"
    assert "numbered without gap or repeat" in failures_in(clean, "transitions", ("judgements", f"{change}; {others_removed}"))
    listed = ("job", "UPDATE job SET has_listed_devices = true")
    assert "numbered without gap or repeat" not in failures_in(
        clean, "transitions", ("judgements", f"{change}; {others_removed}"), listed
    )
    skipping = change.replace("transition_no = 2,", "transition_no = 3,")
    assert "numbered without gap or repeat" in failures_in(
        clean, "transitions", ("judgements", f"{skipping}; {others_removed}"), listed
    )


def test_unemitted_transitions_after_a_rollback_from_chosen_devices_pass(tmp_path: Path) -> None:
    beats = {"a": range(0, 600, 10), "b": [*range(0, 150, 10), 250, 260, 270, *range(400, 500, 10)]}
    rows = [signal(at, device) for device, seconds in beats.items() for at in seconds]
    policy = parse_policy({"rules": {"timeout": "30s", "forget_after": "1h"}}).normalised()
    rows = sorted([row(-1, "fleet/_/_/policy", policy=policy, effective_from_s=-500), *rows], key=lambda one: one.received_at_ms)
    first, second, third = (
        [one for one in rows if begin <= (one.received_at_ms - START) / 1000 < end]
        for begin, end in ((-1, 160), (160, 450), (450, 600))
    )
    complete = outcome(first, DEPLOYMENT)
    only_a = {"devices": {"a": complete.devices["a"]}, "pending": [one for one in complete.pending if one.device_id == "a"]}
    meanwhile = outcome(second, DEPLOYMENT, initial=replace(complete, judgements=[], **only_a))
    unemitted = outcome(second, DEPLOYMENT, initial=replace(complete, judgements=[]))
    rolled_back = outcome(third, DEPLOYMENT, initial=replace(unemitted, judgements=[]))
    home = judged_home(
        tmp_path / "home", rows, DEPLOYMENT, [*complete.judgements, *meanwhile.judgements, *rolled_back.judgements]
    )
    assert "numbered without gap or repeat" in failures_in(home, "transitions"), "the record has no choice of devices"

    save_generations(
        home.lifecycle, generations_from({}, {"generation": 1, "only": "device_id = 'a'"}, {"generation": 1, "batch": 5})
    )
    home.checkpoint.parent.joinpath("gen-0001").rename(home.checkpoint)
    assert failures_in(home, "transitions") == {}
    backward = "UPDATE judgements SET transition_no = 0 WHERE kind = 'transition' AND transition_no = 6"
    assert "numbered without gap or repeat" in failures_in(home, "transitions", ("judgements", backward))
    chosen = ("checked", "UPDATE checked SET has_chosen_devices = true")
    assert (failures_in(home, "state", chosen), list(failures_in(home, "state"))) == ({}, ["is not stale"])


def test_starts_from_current_requires_the_position_of_the_running_generation(tmp_path: Path) -> None:
    home = empty(tmp_path / "home", DEPLOYMENT)
    home.lifecycle.mkdir(parents=True)
    save_generations(home.lifecycle, generations_from({}, {"generation": 1, "batch": 1}))
    at = CheckpointPosition(9, 40, 1, 2)

    def starts_at_current(source: dict[str, Any], bronze: int = 40) -> bool:
        rows: Any = None
        return starts_from_current(home, GenerationSpec("verb", source, rows, bronze, 4, 2, 1), at)

    assert starts_at_current({"generation": 2, "batch": 9})
    assert not starts_at_current({"generation": 1, "batch": 9}), "it rolls back to an earlier generation"
    assert not starts_at_current({"snapshot": 3, "generation": 2, "batch": 9, "only": None}), "it starts from a snapshot"
    assert not starts_at_current({"generation": 2, "batch": 9}, bronze=39)


def test_snapshot_counts_devices_before_due_timers_fire(clean: Home) -> None:
    history = eventful_history(SEED)
    home = clean
    state = state_rows(history, DEPLOYMENT)
    write_state(home, state, devices=5)
    assert failures_in(home, "snapshot") == {}, "devices are counted before due timers fire"
    write_state(home, state)


@pytest.mark.parametrize("content", ["no JSON", "[]", "{}", None])
def test_state_with_damaged_group_rows_shuts_the_gate(content: str | None, tmp_path: Path) -> None:
    history = eventful_history(SEED)
    home = judged_home(tmp_path / "home", history, DEPLOYMENT)
    sound = state_rows(history, DEPLOYMENT)
    damaged = [{**one, "content": content} if one["part"] == GROUP else one for one in sound.to_pylist()]
    write_state(home, pa.Table.from_pylist(damaged, sound.schema), like=sound)
    state = snapshot_state(home)
    assert state is not None
    with refused("quality-gate-shut"):
        refuse(gate(home, state), "nothing may be built on it")


def test_opened_tables_exclude_rows_that_land_later(tmp_path: Path) -> None:
    history = eventful_history(SEED)
    home = judged_home(tmp_path / "home", history, DEPLOYMENT)
    late = replace(history[-1], received_at_ms=history[-1].received_at_ms + 1000, event_time_ms=history[0].received_at_ms)
    with opened(home) as tables:
        names = {name: list(files) for name, files in tables.files.items()}
        land(home, [late], 2)
        assert tables.count("SELECT * FROM messages") == len(history)
        assert {name: list(files) for name, files in tables.files.items()} == names
    with opened(home) as tables:
        assert tables.count("SELECT * FROM messages") == len(history) + 1


@pytest.fixture(scope="module")
def flooded_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Create a home in which late messages and copies of a device share rows."""
    rows = flooded(eventful_history(SEED), "device-1", 40)
    rows.append(signal((rows[-1].received_at_ms - START) / 1_000 + 120, "device-3"))
    judged, until_ms = replay(rows, DEPLOYMENT), rows[-1].received_at_ms
    emitted = [*summed(judged[::2], until_ms), *summed(judged[1::2], until_ms)]
    assert {one.kind for one in emitted if one.messages is not None} == {"late", "duplicate"}
    return judged_home(tmp_path_factory.mktemp("flooded") / "home", rows, DEPLOYMENT, emitted)


def test_home_with_rows_for_several_messages_passes(flooded_home: Home) -> None:
    assert failed_expectations(flooded_home) == []


@pytest.mark.parametrize("kind", ["late", "duplicate"])
@pytest.mark.parametrize(("change", "failed"), [(-1, "none is missing"), (1, "none is extra")])
def test_wrong_sum_of_messages_is_found(kind: str, change: int, failed: str, flooded_home: Home) -> None:
    group = f"kind = '{kind}' AND messages IS NOT NULL"
    first = f"received_at = (SELECT min(received_at) FROM judgements WHERE {group})"
    wrong = ("judgements", f"UPDATE judgements SET messages = messages + {change} WHERE {group} AND {first}")
    assert failures_in(flooded_home, "accounts", wrong) == {failed: 1}
    floor = ("job", "UPDATE job SET listed_since = newest_received - INTERVAL 1 SECOND")
    assert failures_in(flooded_home, "accounts", wrong, floor) == {}, "the floor cuts the group"


NEWEST = "(SELECT newest_received FROM job)"


@pytest.mark.parametrize(("received", "fails"), [(f"{NEWEST} - INTERVAL 1 SECOND", True), (NEWEST, False)])
def test_missing_line_of_a_recording_fails_only_before_the_newest_row(received: str, fails: bool, clean: Home) -> None:
    first = "UPDATE messages SET recording = 'r', line = 0 WHERE received_at = (SELECT min(received_at) FROM messages)"
    beyond = f"""INSERT INTO quarantine BY NAME SELECT 'b' AS bridge, 1 AS place, 'r' AS recording, 7 AS line,
                 {received} AS received_at"""
    failed = failures_in(clean, "recordings", ("messages", first), ("quarantine", beyond))
    assert ("no line is missing" in failed) == fails
    lines_removed = ("job", "UPDATE job SET has_all_lines = false")
    assert failures_in(clean, "recordings", ("messages", first), ("quarantine", beyond), lines_removed) == {}


@pytest.mark.parametrize("case", ["at the newest row", "before the retention floor"])
def test_missing_listing_passes_if_its_row_may_be_unread_or_removed(case: str, clean: Home) -> None:
    when = {"at the newest row": NEWEST, "before the retention floor": "TIMESTAMPTZ '2001-01-01 00:00:00+00'"}[case]
    first_late = "kind = 'late' AND received_at = (SELECT min(received_at) FROM expected_judgements WHERE kind = 'late')"
    floor = ("job", "UPDATE job SET listed_since = TIMESTAMPTZ '2002-01-01 00:00:00+00'")
    moved = ("expected_judgements", f"UPDATE expected_judgements SET received_at = {when} WHERE {first_late}")
    removed = ("judgements", f"DELETE FROM judgements WHERE {first_late}")
    assert failures_in(clean, "accounts", removed) == {"none is missing": 1}
    assert failures_in(clean, "accounts", removed, moved, floor) == {}


def test_retention_floors_limit_recording_lines_and_listed_messages(tmp_path: Path) -> None:
    home = empty(tmp_path / "home", DEPLOYMENT)
    shards = Shards((ShardProgress(Coverage(START), START, START),))
    before = position_from(home, START, shards, Policies(), Origin())
    (home.path / "kept.json").write_text(json.dumps({"quarantine": START, "late": START}))
    after = position_from(home, START, shards, Policies(), Origin())
    assert (before.has_all_lines, before.listed_since_ms) == (True, 0)
    assert (after.has_all_lines, after.listed_since_ms) == (False, START + DEPLOYMENT.max_clock_lead_ms)


@pytest.fixture(scope="module")
def pending_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Create a home with a pending registry entry of tomorrow and a pending gateway will."""
    newest_s = (eventful_history(SEED)[-1].received_at_ms - START) / 1000 + 1
    entry = row(newest_s, "device-1/registry", op="decommission", effective_from_s=newest_s + 86_400)
    will = row(newest_s + 1, "device-2/death", gateway="device-2")
    last = signal(newest_s + 2, "device-3")
    return judged_home(
        tmp_path_factory.mktemp("pending") / "home", positioned([*eventful_history(SEED), entry, will, last]), DEPLOYMENT
    )


@pytest.mark.parametrize(
    ("which", "kind"),
    [
        ("device_id = 'device-1'", "registry"),
        ("received_at = (SELECT max(received_at) FROM reserved_rows WHERE device_id = '_') AND device_id = '_'", "death"),
        ("device_id <> '_'", "registry"),
    ],
)
def test_lost_or_duplicated_pending_row_is_found(which: str, kind: str, pending_home: Home) -> None:
    assert failures_in(pending_home, "pending messages") == {}
    condition = f"{which} AND kind = '{kind}'"
    assert failures_in(pending_home, "pending messages", ("reserved_rows", f"DELETE FROM reserved_rows WHERE {condition}")) == {
        "none is missing": 1
    }
    duplicated = f"INSERT INTO reserved_rows SELECT * FROM reserved_rows WHERE {condition}"
    assert failures_in(pending_home, "pending messages", ("reserved_rows", duplicated)) == {"none is extra": 1}


def test_lost_pending_message_is_found_although_another_is_duplicated(pending_home: Home) -> None:
    oldest = "(SELECT min(event_time) FROM state WHERE part = 'signal')"
    swapped = f"""INSERT INTO state SELECT * FROM state WHERE part = 'signal' AND event_time =
                      (SELECT max(event_time) FROM state WHERE part = 'signal' AND event_time > {oldest});
                  DELETE FROM state WHERE part = 'signal' AND event_time = {oldest}"""
    assert failures_in(pending_home, "pending messages", ("state", swapped)).keys() == {"none is missing", "none is extra"}


def test_coverage_of_a_state_is_compared_by_gaps_frontier_and_policies(clean: Home) -> None:
    with opened_tables(clean) as (tables, _):
        [context] = heads_of(tables).contexts
    known = by_bronze(clean, json.loads(context)["newest_ms"])
    assert has_same_coverage(context, known)
    policies = json.loads(context)["policies"]
    differences: list[dict[str, Any]] = [
        {"gaps": [[START + 900_000, None]], "deaf": ["b"]},
        {"frontier_ms": json.loads(context)["frontier_ms"] - 1},
        {"policies": [*policies[:-1], {**policies[-1], "received_at_ms": 7}]},
    ]
    for difference in differences:
        assert not has_same_coverage(json.dumps({**json.loads(context), **difference}), known)


def test_retention_during_a_replay_skips_the_affected_suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = eventful_history(SEED)
    home = judged_home(tmp_path / "home", history, DEPLOYMENT)
    middle_ms = sorted(one.received_at_ms for one in history)[len(history) // 2]

    def replay_after_retention(home: Home, newest_ms: int, origin: Origin, report: ReportProgress) -> tuple[pa.Table, pa.Table]:
        """Apply retention, then replay bronze."""
        raise_floor(home, MESSAGES.name, middle_ms)
        table = DeltaTable(str(home.table(MESSAGES.name)))
        kept = table.to_pyarrow_table(filters=[("received_at", ">=", datetime.fromtimestamp(middle_ms / 1000, UTC))])
        write_deltalake(table, kept, mode="overwrite")
        return replay_bronze(home, newest_ms, origin, report)

    lines = list[str]()
    with monkeypatch.context() as unpaced:
        unpaced.setattr("batch.common.progress.EVERY_S", 0)
        assert run(home, ["verdicts"], report=lines.append).gate_failures() == []
    assert [one.split(",")[0] for one in lines] == ["evaluating suite 1 of 1", "judging: 1 of 1 slices"]
    monkeypatch.setattr("batch.quality.derived_tables.replay_bronze", replay_after_retention)
    report = run(home, ["verdicts", "accounts", "transitions"])
    assert report.gate_failures() == []
    reasons = {(one.suite, one.outcome, one.why) for one in report.findings()}
    reason = "maintenance removed messages of the replay meanwhile"
    assert reasons == {("verdicts", "skipped", reason), ("accounts", "skipped", reason), ("transitions", "passed", "")}


def test_replay_starts_at_a_complete_snapshot_if_the_first_rows_were_removed(tmp_path: Path) -> None:
    old = [signal(at_s, device) for at_s in range(-3 * 86_400, -3 * 86_400 + 100, 10) for device in ("device-1", "gone")]
    [policy, *rest] = eventful_history(SEED)
    early = replace(policy, received_at_ms=old[0].received_at_ms - 1, event_time_ms=old[0].received_at_ms - DAY_MS)
    history, cut = [early, *old, *rest], 1 + len(old)
    home = judged_home(tmp_path / "home", history, DEPLOYMENT, cut=cut)
    bronze = DeltaTable(str(home.table(MESSAGES.name))).version()
    apply_retention(home, bronze, DAY_MS)
    suites = ["verdicts", "accounts", "deadlines", "state as judged"]
    assert {one.outcome for one in run(home, suites).findings()} == {"skipped"}, (
        "the newest snapshot is no origin, as no rows follow it"
    )
    write_state(home, state_rows(history[:cut], DEPLOYMENT), bronze=bronze)
    write_state(home, state_rows(history, DEPLOYMENT), bronze=bronze + 1)
    report = run(home, suites)
    assert {one.outcome for one in report.findings()} == {"passed"}
    assert all(one.rows for one in report.suite_runs)
    DeltaTable(str(home.table(JUDGEMENTS.name))).delete("kind = 'late'")
    incomplete = run(home, suites)
    assert [one.suite for one in incomplete.gate_failures()] == ["accounts"]


def test_replay_never_starts_at_a_snapshot_from_before_a_choice_of_devices(tmp_path: Path) -> None:
    history = eventful_history(SEED)
    home = judged_home(tmp_path / "home", history, DEPLOYMENT, cut=len(history) // 2)
    newest_ms, bronze = history[-1].received_at_ms, DeltaTable(str(home.table(MESSAGES.name))).version()
    chosen: list[dict[str, Any]] = [{}, {"snapshot": 1, "generation": 1, "only": "site = 'north'"}, {"generation": 2}]
    assert origin_of(home, newest_ms) == Origin()
    state = state_rows(history[: len(history) // 2], DEPLOYMENT)
    write_state(home, state, bronze=bronze)
    save_generations(home.lifecycle, generations_from(*chosen))
    assert origin_of(home, newest_ms) is None, "the snapshot was taken before the choice"
    write_state(home, state, bronze=bronze, generation=2)
    found = origin_of(home, newest_ms)
    assert found is not None and found.snapshot is not None and found.snapshot.generation == 2
    assert origin_of(home, newest_ms, excluded=found.snapshot.version) is None
    rolled_back = Generations(1, generations_from(*chosen).known)
    save_generations(home.lifecycle, rolled_back)
    assert origin_of(home, newest_ms) is None, "the generation of the snapshot was rolled back"


def test_retraction_of_a_verdict_delayed_by_jitter_passes(tmp_path: Path) -> None:
    policy = row(-1, "fleet/_/_/policy", policy=parse_policy({"rules": {"timeout": "30s"}}).normalised(), effective_from_s=-500)
    silent = [*(signal(at_s, "d") for at_s in range(0, 101, 10)), signal(120, "d", received_s=165)]  # received late
    history = [policy, *silent, *(signal(at_s, "e") for at_s in range(0, 191, 10))]
    home = judged_home(tmp_path / "home", history, replace(DEPLOYMENT, verdict_jitter_ms=120_000))
    DeltaTable(str(home.table(JUDGEMENTS.name))).delete("device_id = 'd' AND to_mode = 'offline'")
    [amended, *_] = amend_home(home, AmendRequest())
    assert (amended.device_id, amended.retracted) == ("d", 1)
    assert failures_in(home, "amendments") == {}
    settled = ("job", "UPDATE job SET settled = frontier")
    assert failures_in(home, "amendments", settled) == {"retracts an emitted transition": 1}


def test_outdated_snapshot_is_a_warning_and_does_not_shut_the_gate(tmp_path: Path) -> None:
    home = judged_home(tmp_path / "home", eventful_history(SEED), DEPLOYMENT)
    later_ms = START + 3 * 86_400_000
    tick = {
        "device_id": "_",
        "site": "_",
        "kind": "tick",
        "clock": "bridge",
        "received_at_ms": later_ms,
        "event_time_ms": later_ms,
    }
    arrival = {"origin": "bridge", "bridge": "b", "segment": 2, "digest": 0, "device_hash": 0}
    delta.append(home, MESSAGES, delta.to_table(MESSAGES, [{**tick, **arrival}]), "test", 2)
    commit_batch(home.checkpoint, 2, later_ms)
    report = run(home, ["snapshot"])
    found = {(one.expectation, one.outcome, one.severity) for one in report.findings() if one.outcome != "passed"}
    assert found == {("is recent", "failed", "warning")}
    refuse(report, "nothing")


def test_generation_with_verdicts_to_emit_cannot_be_replaced() -> None:
    summary, verdict = (json.dumps({"kind": kind, "device_id": "d"}) for kind in ("summary", "transition"))
    require_emitted([])
    require_emitted([summary])
    with refused("generation-has-verdicts"):
        require_emitted([summary, verdict])
