"""What the suites are told beside the tables: which devices a state was made of, and how far it has come."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from batch.amend import AmendRequest, amend_home
from batch.common.progress import Say
from batch.quality.derived_tables import snapshot_state
from batch.quality.facts import by_bronze, has_same_coverage, heads_of, is_chosen, position_from
from batch.quality.rejudge import Origin, origin_of, replay_bronze
from batch.quality.run import gate, refuse, run
from batch.state.generation import GenerationSpec, require_emitted, starts_from_current
from fleetpulse.columnar.snapshot.rows import GROUP
from fleetpulse.core.policy import Policies, parse_policy
from fleetpulse.core.presence.coverage import Coverage, ShardProgress
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import Deployment, outcome
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.io.checkpoints.checkpoint import CheckpointPosition
from fleetpulse.io.checkpoints.generations import DISCARDED, RETIRED, Generation, Generations, save_generations
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import promise
from fleetpulse.io.quality.great_expectations import Expectations
from fleetpulse.io.quality.suite_inputs import opened
from fleetpulse.io.tables import tables as delta
from tests.support.histories.histories import START, positioned, row, signal
from tests.support.homes.homes import apply_retention, commit_batch, empty, land
from tests.support.homes.quality import NAMED, eventful_history, judged_home, opened_tables, plant, state_rows, write_state
from tests.support.refusals import refused

pytestmark = [
    pytest.mark.unit,
    pytest.mark.timeout(600),  # the library alone takes seconds to import
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # that library's own
]
DEPLOYMENT = Deployment(30_000, 20_000)
SEED = 7
DAY_MS = 86_400_000


def made(*sources: dict[str, Any]) -> Generations:
    """Return a record of generations, each made from something."""
    known = {number: Generation(number, 4, 1, "verb", source, status=RETIRED) for number, source in enumerate(sources, 1)}
    return Generations(len(sources), known)


def failed_in(home: Home, suite: str, *planted: tuple[str, str]) -> dict[str, int]:
    """Return how many rows fail each expectation of a suite, after changes of the tables that were opened."""
    with opened_tables(home) as (tables, worked):
        worked.make(NAMED[suite])
        for name, sql in planted:
            plant(tables, name, sql)
        rows = tables.frame(NAMED[suite].rows)
        answers = Expectations(home.path / "aside", "planted").evaluate(NAMED[suite], rows)
    assert [one.fault for one in answers if one.fault] == []
    return {one.expectation.name: one.failed for one in answers if one.failed}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return judged_home(tmp_path_factory.mktemp("stands") / "home", eventful_history(SEED), DEPLOYMENT)


def test_a_generation_is_of_some_devices_where_one_that_it_comes_from_was() -> None:
    of_some = ({}, {"snapshot": 3, "generation": 1, "only": "site = 'a'"}, {"generation": 2, "batch": 7}, {"generation": 3})
    assert [is_chosen(made(*of_some), number) for number in (1, 2, 3, 4)] == [False, True, True, True]
    of_a_list = ({}, {"devices": "the registry", "generation": 1}, {"snapshot": 9, "generation": 2, "only": None})
    assert is_chosen(made(*of_a_list), 3)
    back = made(*of_some, {"generation": 1, "batch": 2})
    assert is_chosen(back, 5), "it goes on from what the first one was, and does not know of whom was spoken since"
    never = {number: replace(one, status=DISCARDED) if 1 < number < 5 else one for number, one in back.known.items()}
    assert not is_chosen(Generations(5, never), 5)


def test_a_listed_device_that_began_silent_says_its_second_transition_first(clean: Home) -> None:
    change = """UPDATE judgements SET device_id = 'listed', transition_no = 2, from_mode = 'offline'
                 WHERE device_id || life || transition_no = (SELECT min(device_id || life || transition_no) FROM judgements
                                                             WHERE kind = 'transition' AND transition_no = 1)"""
    alone = "DELETE FROM judgements WHERE device_id <> 'listed'"
    assert "numbers without gap or repeat" in failed_in(clean, "transitions", ("judgements", f"{change}; {alone}"))
    listed = ("stand", "UPDATE stand SET listed = true")
    assert "numbers without gap or repeat" not in failed_in(clean, "transitions", ("judgements", f"{change}; {alone}"), listed)
    more = change.replace("transition_no = 2,", "transition_no = 3,")
    assert "numbers without gap or repeat" in failed_in(clean, "transitions", ("judgements", f"{more}; {alone}"), listed)


def test_what_was_judged_silently_on_a_way_back_from_some_devices_is_no_fault(tmp_path: Path) -> None:
    beats = {"a": range(0, 600, 10), "b": [*range(0, 150, 10), 250, 260, 270, *range(400, 500, 10)]}
    rows = [signal(at, device) for device, seconds in beats.items() for at in seconds]
    policy = parse_policy({"rules": {"timeout": "30s", "forget_after": "1h"}}).normalised()
    rows = sorted([row(-1, "fleet/_/_/policy", policy=policy, effective_from_s=-500), *rows], key=lambda one: one.received_at_ms)
    first, second, third = (
        [one for one in rows if begin <= (one.received_at_ms - START) / 1000 < end]
        for begin, end in ((-1, 160), (160, 450), (450, 600))
    )
    all_of_them = outcome(first, DEPLOYMENT)
    only_a = {"devices": {"a": all_of_them.devices["a"]}, "waiting": [one for one in all_of_them.pending if one.device_id == "a"]}
    meanwhile = outcome(second, DEPLOYMENT, begun=replace(all_of_them, judgements=[], **only_a))
    silent = outcome(second, DEPLOYMENT, begun=replace(all_of_them, judgements=[]))
    back = outcome(third, DEPLOYMENT, begun=replace(silent, judgements=[]))
    home = judged_home(tmp_path / "home", rows, DEPLOYMENT, [*all_of_them.judgements, *meanwhile.judgements, *back.judgements])
    assert "numbers without gap or repeat" in failed_in(home, "transitions"), "nobody says that there was a choice"

    save_generations(home.lifecycle, made({}, {"generation": 1, "only": "device_id = 'a'"}, {"generation": 1, "batch": 5}))
    home.checkpoint.parent.joinpath("gen-0001").rename(home.checkpoint)
    assert failed_in(home, "transitions") == {}
    backward = "UPDATE judgements SET transition_no = 0 WHERE kind = 'transition' AND transition_no = 6"
    assert "numbers without gap or repeat" in failed_in(home, "transitions", ("judgements", backward))
    chosen = ("taken", "UPDATE taken SET chosen = true")
    assert (failed_in(home, "state", chosen), list(failed_in(home, "state"))) == ({}, ["is not stale"])


def test_only_what_is_made_of_the_running_state_is_not_compared_with_it(tmp_path: Path) -> None:
    home = empty(tmp_path / "home", DEPLOYMENT)
    home.lifecycle.mkdir(parents=True)
    save_generations(home.lifecycle, made({}, {"generation": 1, "batch": 1}))
    at = CheckpointPosition(9, 40, 1, 2)

    def it_is(source: dict[str, Any], bronze: int = 40) -> bool:
        rows: Any = None
        return starts_from_current(home, GenerationSpec("verb", source, rows, bronze, 4, 2, 1), at)

    assert it_is({"generation": 2, "batch": 9})
    assert not it_is({"generation": 1, "batch": 9}), "a rollback to an earlier one"
    assert not it_is({"snapshot": 3, "generation": 2, "batch": 9, "only": None}), "what was stored as a snapshot"
    assert not it_is({"generation": 2, "batch": 9}, bronze=39)


def test_a_snapshot_taken_in_a_lag_has_the_devices_that_its_groups_had_when_they_were_taken(clean: Home) -> None:
    history = eventful_history(SEED)
    home = clean
    state = state_rows(history, DEPLOYMENT)
    write_state(home, state, devices=5)
    assert failed_in(home, "snapshot") == {}, "the heads were counted before what was due acted"
    write_state(home, state)


@pytest.mark.parametrize("content", ["no JSON", "[]", "{}", None])
def test_a_state_whose_groups_do_not_say_how_far_they_are_is_a_fault_with_a_sentence(content: str | None, tmp_path: Path) -> None:
    history = eventful_history(SEED)
    home = judged_home(tmp_path / "home", history, DEPLOYMENT)
    sound = state_rows(history, DEPLOYMENT)
    told = [{**one, "content": content} if one["part"] == GROUP else one for one in sound.to_pylist()]
    write_state(home, pa.Table.from_pylist(told, sound.schema), like=sound)
    state = snapshot_state(home)
    assert state is not None
    with refused("quality-gate-shut"):
        refuse(gate(home, state), "nothing may be built on it")


def test_what_lands_while_it_is_looked_at_is_not_looked_at(tmp_path: Path) -> None:
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


NEWEST = "(SELECT newest FROM stand)"


@pytest.mark.parametrize(("received", "lost"), [(f"{NEWEST} - INTERVAL 1 SECOND", True), (NEWEST, False)])
def test_a_line_of_a_recording_is_missed_only_when_all_before_it_has_been_read(received: str, lost: bool, clean: Home) -> None:
    first = "UPDATE messages SET recording = 'r', line = 0 WHERE received_at = (SELECT min(received_at) FROM messages)"
    beyond = f"""INSERT INTO quarantine BY NAME SELECT 'b' AS bridge, 1 AS place, 'r' AS recording, 7 AS line,
                 {received} AS received_at"""
    failed = failed_in(clean, "recordings", ("messages", first), ("quarantine", beyond))
    assert ("no line is lost" in failed) == lost
    gone = ("stand", "UPDATE stand SET lines = false")
    assert failed_in(clean, "recordings", ("messages", first), ("quarantine", beyond), gone) == {}


@pytest.mark.parametrize("named", ["at the newest row", "before what is kept"])
def test_a_message_of_which_nothing_was_said_is_not_lost_where_it_may_be_unread_or_gone(named: str, clean: Home) -> None:
    when = {"at the newest row": NEWEST, "before what is kept": "TIMESTAMPTZ '2001-01-01 00:00:00+00'"}[named]
    one = "kind = 'late' AND received_at = (SELECT min(received_at) FROM defined WHERE kind = 'late')"
    told = ("stand", "UPDATE stand SET told = TIMESTAMPTZ '2002-01-01 00:00:00+00'")
    elsewhere = ("defined", f"UPDATE defined SET received_at = {when} WHERE {one}")
    gone = ("judgements", f"DELETE FROM judgements WHERE {one}")
    assert failed_in(clean, "accounts", gone) == {"none is lost": 1}
    assert failed_in(clean, "accounts", gone, elsewhere, told) == {}


def test_what_is_kept_of_quarantine_says_nothing_of_the_verdicts(tmp_path: Path) -> None:
    home = empty(tmp_path / "home", DEPLOYMENT)
    shards = Shards((ShardProgress(Coverage(START), START, START),))
    before = position_from(home, START, shards, Policies(), Origin())
    (home.path / "kept.json").write_text(json.dumps({"quarantine": START, "late": START}))
    after = position_from(home, START, shards, Policies(), Origin())
    assert (before.lines, before.told_ms) == (True, 0)
    assert (after.lines, after.told_ms) == (False, START + DEPLOYMENT.max_clock_lead_ms)


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home in which an entry of the registry takes effect tomorrow, and what a gateway's will says to everybody waits."""
    newest_s = (eventful_history(SEED)[-1].received_at_ms - START) / 1000 + 1
    entry = row(newest_s, "device-1/registry", op="decommission", effective_from_s=newest_s + 86_400)
    will = row(newest_s + 1, "device-2/death", gateway="device-2")
    last = signal(newest_s + 2, "device-3")
    return judged_home(
        tmp_path_factory.mktemp("waits") / "home", positioned([*eventful_history(SEED), entry, will, last]), DEPLOYMENT
    )


@pytest.mark.parametrize(
    ("which", "kind"),
    [
        ("device_id = 'device-1'", "registry"),
        ("received_at = (SELECT max(received_at) FROM own_rows WHERE device_id = '_') AND device_id = '_'", "death"),
        ("device_id <> '_'", "registry"),
    ],
)
def test_a_row_that_waits_for_its_time_is_missed_and_noticed_when_it_is_there_twice(which: str, kind: str, waits: Home) -> None:
    assert failed_in(waits, "waiting") == {}
    such = f"{which} AND kind = '{kind}'"
    assert failed_in(waits, "waiting", ("own_rows", f"DELETE FROM own_rows WHERE {such}")) == {"none is lost": 1}
    again = f"INSERT INTO own_rows SELECT * FROM own_rows WHERE {such}"
    assert failed_in(waits, "waiting", ("own_rows", again)) == {"none is made up": 1}


def test_a_message_that_is_lost_is_missed_though_another_waits_twice(waits: Home) -> None:
    few = "(SELECT min(event_time) FROM state WHERE part = 'signal')"
    swapped = f"""INSERT INTO state SELECT * FROM state WHERE part = 'signal' AND event_time =
                      (SELECT max(event_time) FROM state WHERE part = 'signal' AND event_time > {few});
                  DELETE FROM state WHERE part = 'signal' AND event_time = {few}"""
    assert failed_in(waits, "waiting", ("state", swapped)).keys() == {"none is lost", "none is made up"}


def test_a_state_listens_as_bronze_says_only_with_its_gaps_its_frontier_and_its_policies(clean: Home) -> None:
    with opened_tables(clean) as (tables, _):
        [world] = heads_of(tables).worlds
    known = by_bronze(clean, json.loads(world)["newest_ms"])
    assert has_same_coverage(world, known)
    policies = json.loads(world)["policies"]
    other: list[dict[str, Any]] = [
        {"gaps": [[START + 900_000, None]], "deaf": ["b"]},
        {"frontier_ms": json.loads(world)["frontier_ms"] - 1},
        {"policies": [*policies[:-1], {**policies[-1], "received_at_ms": 7}]},
    ]
    for one in other:
        assert not has_same_coverage(json.dumps({**json.loads(world), **one}), known)


def test_what_was_worked_out_beside_the_first_retention_is_not_held_against_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = eventful_history(SEED)
    home = judged_home(tmp_path / "home", history, DEPLOYMENT)
    middle_ms = sorted(one.received_at_ms for one in history)[len(history) // 2]

    def beside(home: Home, newest_ms: int, origin: Origin, say: Say) -> tuple[pa.Table, pa.Table]:
        """Judge again when retention has begun."""
        promise(home, MESSAGES.name, middle_ms)
        table = DeltaTable(str(home.table(MESSAGES.name)))
        kept = table.to_pyarrow_table(filters=[("received_at", ">=", datetime.fromtimestamp(middle_ms / 1000, UTC))])
        write_deltalake(table, kept, mode="overwrite")
        return replay_bronze(home, newest_ms, origin, say)

    said = list[str]()
    with monkeypatch.context() as at_once:
        at_once.setattr("batch.common.progress.EVERY_S", 0)
        assert run(home, ["verdicts"], say=said.append).gate_failures() == []
    assert [one.split(",")[0] for one in said] == ["evaluating suite 1 of 1", "judging: 1 of 1 slices"]
    monkeypatch.setattr("batch.quality.derived_tables.judged_again", beside)
    report = run(home, ["verdicts", "accounts", "transitions"])
    assert report.gate_failures() == []
    reasons = {(one.suite, one.outcome, one.why) for one in report.findings()}
    why = "maintenance removed messages of the replay meanwhile"
    assert reasons == {("verdicts", "skipped", why), ("accounts", "skipped", why), ("transitions", "passed", "")}


def test_when_the_first_rows_are_gone_a_look_begins_with_a_snapshot_from_which_all_that_followed_is_kept(tmp_path: Path) -> None:
    old = [signal(at_s, device) for at_s in range(-3 * 86_400, -3 * 86_400 + 100, 10) for device in ("device-1", "gone")]
    [policy, *rest] = eventful_history(SEED)
    early = replace(policy, received_at_ms=old[0].received_at_ms - 1, event_time_ms=old[0].received_at_ms - DAY_MS)
    history, cut = [early, *old, *rest], 1 + len(old)
    home = judged_home(tmp_path / "home", history, DEPLOYMENT, cut=cut)
    bronze = DeltaTable(str(home.table(MESSAGES.name))).version()
    apply_retention(home, bronze, DAY_MS)
    named = ["verdicts", "accounts", "deadlines", "state as judged"]
    assert {one.outcome for one in run(home, named).findings()} == {"skipped"}, "the newest one is nothing's origin"
    write_state(home, state_rows(history[:cut], DEPLOYMENT), bronze=bronze)
    write_state(home, state_rows(history, DEPLOYMENT), bronze=bronze + 1)
    report = run(home, named)
    assert {one.outcome for one in report.findings()} == {"passed"}
    assert all(one.rows for one in report.suite_runs)
    DeltaTable(str(home.table(JUDGEMENTS.name))).delete("kind = 'late'")
    lost = run(home, named)
    assert [one.suite for one in lost.gate_failures()] == ["accounts"]


def test_where_devices_were_chosen_a_look_begins_with_a_snapshot_of_them_and_never_across_the_choice(tmp_path: Path) -> None:
    history = eventful_history(SEED)
    home = judged_home(tmp_path / "home", history, DEPLOYMENT, cut=len(history) // 2)
    newest_ms, bronze = history[-1].received_at_ms, DeltaTable(str(home.table(MESSAGES.name))).version()
    chosen: list[dict[str, Any]] = [{}, {"snapshot": 1, "generation": 1, "only": "site = 'north'"}, {"generation": 2}]
    assert origin_of(home, newest_ms) == Origin()
    state = state_rows(history[: len(history) // 2], DEPLOYMENT)
    write_state(home, state, bronze=bronze)
    save_generations(home.lifecycle, made(*chosen))
    assert origin_of(home, newest_ms) is None, "it was taken before"
    write_state(home, state, bronze=bronze, generation=2)
    found = origin_of(home, newest_ms)
    assert found is not None and found.snapshot is not None and found.snapshot.generation == 2
    assert origin_of(home, newest_ms, but=found.snapshot.version) is None
    back = Generations(1, made(*chosen).known)
    save_generations(home.lifecycle, back)
    assert origin_of(home, newest_ms) is None, "it was gone back from"


def test_what_is_taken_back_before_it_is_said_is_none_of_the_laws_while_a_jitter_holds_it_back(tmp_path: Path) -> None:
    policy = row(-1, "fleet/_/_/policy", policy=parse_policy({"rules": {"timeout": "30s"}}).normalised(), effective_from_s=-500)
    silent = [*(signal(at_s, "d") for at_s in range(0, 101, 10)), signal(120, "d", received_s=165)]  # which came too late
    history = [policy, *silent, *(signal(at_s, "e") for at_s in range(0, 191, 10))]
    home = judged_home(tmp_path / "home", history, replace(DEPLOYMENT, verdict_jitter_ms=120_000))
    DeltaTable(str(home.table(JUDGEMENTS.name))).delete("device_id = 'd' AND to_mode = 'offline'")
    [amended, *_] = amend_home(home, AmendRequest())
    assert (amended.device_id, amended.retracted) == ("d", 1)
    assert failed_in(home, "amendments") == {}
    later = ("stand", "UPDATE stand SET settled = frontier")
    assert failed_in(home, "amendments", later) == {"takes back what was said": 1}


def test_a_snapshot_that_the_job_has_left_behind_is_reported_and_shuts_no_gate(tmp_path: Path) -> None:
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


def test_a_generation_with_verdicts_to_emit_is_not_succeeded() -> None:
    summary, verdict = (json.dumps({"kind": kind, "device_id": "d"}) for kind in ("summary", "transition"))
    require_emitted([])
    require_emitted([summary])
    with refused("generation-has-verdicts"):
        require_emitted([summary, verdict])
