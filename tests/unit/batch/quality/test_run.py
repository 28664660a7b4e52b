"""Each kind of defect is caught by the suite that should, and a clean home raises nothing; most by pandas, without a JVM."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute
import pytest
from deltalake import DeltaTable

from batch.quality.derived_tables import snapshot_state
from batch.quality.run import gate, refuse, run
from fleetpulse.core.quality.suites import Suite
from fleetpulse.core.quality.table_suites import SUITES
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES, QUALITY_FAILURES, QUALITY_RESULTS
from fleetpulse.io.home.home import Home
from fleetpulse.io.quality.great_expectations import ExpectationResult, Expectations
from fleetpulse.io.quality.suite_inputs import OpenedTables
from fleetpulse.io.tables import tables as delta
from fleetpulse.reports.quality import failed_rows, quality_runs
from tests.support.histories.histories import START
from tests.support.homes.quality import NAMED, eventful_history, judged_home, opened_tables, plant, state_rows, write_state
from tests.support.refusals import refused

pytestmark = [
    pytest.mark.unit,
    pytest.mark.timeout(600),  # the library alone takes seconds to import
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # that library's own
]
pc: Any = pyarrow.compute  # its functions are made at run time: no checker knows them
DEPLOYMENT = Deployment(30_000, 20_000)
SEED = 5


@dataclass(frozen=True)
class Defect:
    """What is done to which table, and who is to find it."""

    suite: str
    expectation: str
    table: str
    sql: str


TRANSITION = "kind = 'transition'"
NEWEST_OF_ONE = f"""device_id || life || transition_no = (
    SELECT device_id || life || transition_no FROM judgements WHERE {TRANSITION} ORDER BY event_time DESC LIMIT 1)"""
ONE = "device_id = (SELECT min(device_id) FROM state WHERE part = 'device' AND last_seen IS NOT NULL AND transition_no > 1)"
LATE = "received_at = (SELECT min(received_at) FROM judgements WHERE kind = 'late')"
SPAN = "(SELECT min(received_at) FROM coverage WHERE op = 'close')"

DEFECTS = {
    "a lost transition": Defect(
        "transitions", "numbers without gap or repeat", "judgements",
        f"DELETE FROM judgements WHERE {TRANSITION} AND transition_no = 1"),
    "a doubled transition": Defect(
        "judgements table", "key is unique", "judgements",
        f"INSERT INTO judgements SELECT * FROM judgements WHERE {TRANSITION} LIMIT 1"),
    "a forbidden transition": Defect(
        "transitions", "allowed by the table", "judgements",
        "UPDATE judgements SET to_mode = 'decommissioned' WHERE trigger = 'signal'"),
    "a wrong mode before": Defect(
        "transitions", "from mode is the to mode before", "judgements",
        "UPDATE judgements SET from_mode = 'flagged' WHERE trigger = 'silence'"),
    "a gap in the numbers": Defect(
        "transitions", "numbers without gap or repeat", "judgements",
        f"UPDATE judgements SET transition_no = transition_no + 7 WHERE {NEWEST_OF_ONE}"),
    "a transition before the one before it": Defect(
        "transitions", "in the order of time", "judgements",
        f"UPDATE judgements SET event_time = life - INTERVAL 1 HOUR WHERE {NEWEST_OF_ONE}"),
    "a transition in the future": Defect(
        "transitions", "not before its time", "judgements",
        f"UPDATE judgements SET event_time = TIMESTAMPTZ '2100-01-01 00:00:00+00' WHERE {NEWEST_OF_ONE}"),
    "a signal seen after the transition": Defect(
        "transitions", "seen before", "judgements",
        f"UPDATE judgements SET last_seen = event_time + INTERVAL 1 SECOND WHERE {TRANSITION} AND trigger = 'silence'"),
    "a runtime that shrinks": Defect(
        "transitions", "runtime grows", "judgements", f"UPDATE judgements SET runtime_ms = -1 WHERE {NEWEST_OF_ONE}"),
    "a verdict by no policy": Defect(
        "transitions", "by a policy", "judgements", f"UPDATE judgements SET policy_version = NULL WHERE {NEWEST_OF_ONE}"),
    "an offline a second late": Defect(
        "deadlines", "offline exactly at the deadline", "judgements",
        f"UPDATE judgements SET event_time = event_time + INTERVAL 1 SECOND WHERE trigger = 'silence' AND {TRANSITION}"),
    "an offline a second early": Defect(
        "deadlines", "offline exactly at the deadline", "judgements",
        f"UPDATE judgements SET event_time = event_time - INTERVAL 1 SECOND WHERE trigger = 'silence' AND {TRANSITION}"),
    "the newest transition lost": Defect(
        "verdicts", "none is lost", "judgements", f"DELETE FROM judgements WHERE {NEWEST_OF_ONE}"),
    "a transition made up": Defect(
        "verdicts", "none is made up", "judgements",
        f"INSERT INTO judgements SELECT * REPLACE ('nobody' AS device_id) FROM judgements WHERE {TRANSITION} LIMIT 1"),
    "a wrong class": Defect(
        "verdicts", "none is made up", "judgements", f"UPDATE judgements SET device_class = 'other' WHERE {NEWEST_OF_ONE}"),
    "a wrong runtime": Defect(
        "verdicts", "none is made up", "judgements", f"UPDATE judgements SET runtime_ms = runtime_ms + 1 WHERE {NEWEST_OF_ONE}"),
    "a message neither judged nor listed": Defect(
        "accounts", "none is lost", "judgements", f"DELETE FROM judgements WHERE kind = 'late' AND {LATE}"),
    "a copy that was not noticed": Defect(
        "accounts", "none is lost", "judgements", "DELETE FROM judgements WHERE kind = 'duplicate'"),
    "a message listed twice": Defect(
        "accounts", "none is made up", "judgements",
        f"INSERT INTO judgements SELECT * FROM judgements WHERE kind = 'late' AND {LATE} LIMIT 1"),
    "a listed message that never came": Defect(
        "listed", "is in bronze", "messages",
        "DELETE FROM messages WHERE received_at = (SELECT min(received_at) FROM judgements WHERE kind = 'late')"),
    "a message listed without a reason": Defect(
        "listed", "says why", "judgements", "UPDATE judgements SET reason = NULL WHERE kind = 'late'"),
    "a late one that was in time": Defect(
        "listed", "says how late", "judgements", "UPDATE judgements SET late_by_ms = -1 WHERE kind = 'late'"),
    "a clock that is ahead and is listed nowhere": Defect(
        "clocks", "is listed", "judgements", "DELETE FROM judgements WHERE kind IN ('clock', 'duplicate', 'after_decommission')"),
    "a null key": Defect(
        "messages table", "device_id is there", "messages", "UPDATE messages SET device_id = NULL WHERE kind = 'heartbeat'"),
    "an unknown kind of message": Defect(
        "messages table", "kind is known", "messages", "UPDATE messages SET kind = 'ping' WHERE kind = 'heartbeat'"),
    "an unknown mode": Defect(
        "judgements table", "to_mode is known", "judgements", f"UPDATE judgements SET to_mode = 'asleep' WHERE {NEWEST_OF_ONE}"),
    "a quarantined message without a reason": Defect(
        "quarantine table", "reason is there", "quarantine",
        "INSERT INTO quarantine BY NAME SELECT 'b' AS bridge, 1 AS place, 'fleet/x' AS topic"),
    "a message quarantined twice": Defect(
        "quarantine table", "key is unique", "quarantine",
        "INSERT INTO quarantine BY NAME SELECT 'b' AS bridge, 1 AS place, 'json' AS reason FROM range(2)"),
    "a message lost from bronze": Defect(
        "conservation", "no message is lost", "messages",
        "DELETE FROM messages WHERE received_at = (SELECT min(received_at) FROM messages)"),
    "a message that nobody sent": Defect(
        "conservation", "no message is made up", "messages", "INSERT INTO messages SELECT * FROM messages LIMIT 1"),
    "a quarantined message that was lost": Defect(
        "conservation", "none is lost from quarantine", "quarantine", "DELETE FROM quarantine"),
    "a lost line of a recording": Defect(
        "recordings", "no line is lost", "messages",
        "UPDATE messages SET recording = 'r', line = 2 + (SELECT count(*) FROM messages) WHERE kind = 'tick' OR true"),
    "a line of a recording that landed twice": Defect(
        "recordings", "no line came twice", "messages", "UPDATE messages SET recording = 'r', line = 0"),
    "a span that closes and was not open": Defect(
        "coverage spans", "closes what was open", "coverage", "DELETE FROM coverage WHERE op = 'open'"),
    "a span that ends before it began": Defect(
        "coverage spans", "ends after it began", "coverage",
        "UPDATE coverage SET \"at\" = \"at\" - INTERVAL 1 HOUR WHERE op = 'close'"),
    "a span that begins within another": Defect(
        "coverage spans", "no two overlap", "coverage",
        "UPDATE coverage SET \"at\" = \"at\" - INTERVAL 2 MINUTE WHERE op = 'open'"),
    "a span that never ended": Defect(
        "coverage spans", "is closed", "coverage",
        "UPDATE coverage SET op = 'open', received_at = received_at - INTERVAL 2 HOUR"),
    "an amendment of nothing": Defect(
        "amendments", "takes back what was said", "judgements",
        "INSERT INTO judgements BY NAME SELECT 'retract' AS kind, 'd' AS device_id, 9 AS transition_no, 1 AS amendment_no"),
    "a lost amendment": Defect(
        "amendments", "numbers without gap or repeat", "judgements",
        "INSERT INTO judgements BY NAME SELECT 'add' AS kind, 'd' AS device_id, 2 AS amendment_no"),
    "a device lost from the state": Defect(
        "state", "is not missing", "state", f"DELETE FROM state WHERE part = 'device' AND {ONE}"),
    "a device that nobody knows": Defect(
        "state", "is known", "state",
        f"INSERT INTO state SELECT * REPLACE ('nobody' AS device_id) FROM state WHERE part = 'device' AND {ONE}"),
    "a device that is there twice": Defect(
        "state", "is there once", "state", f"INSERT INTO state SELECT * FROM state WHERE part = 'device' AND {ONE}"),
    "a state of no mode": Defect("state", "mode is known", "state", f"UPDATE state SET mode = 'asleep' WHERE {ONE}"),
    "another mode than was said": Defect(
        "state", "mode is that of its transition", "state", f"UPDATE state SET mode = 'updating' WHERE {ONE}"),
    "a stale device": Defect(
        "state", "is not stale", "state",
        f"UPDATE state SET transition_no = transition_no - 1 WHERE part = 'device' AND {ONE}"),
    "a device ahead of the frontier": Defect(
        "state", "is not ahead", "state", f"UPDATE state SET last_seen = TIMESTAMPTZ '2100-01-01 00:00:00+00' WHERE {ONE}"),
    "silence that counts from elsewhere": Defect(
        "state", "silence counts from the last signal", "state",
        f"UPDATE state SET last_seen = last_seen - INTERVAL 1 SECOND WHERE {ONE}"),
    "another last signal than bronze has": Defect(
        "state", "last seen is the newest signal judged", "state",
        f"UPDATE state SET last_seen = last_seen - INTERVAL 1 SECOND, quiet_since = quiet_since - INTERVAL 1 SECOND WHERE {ONE}"),
    "a runtime that was lost": Defect("state", "runtime goes on", "state", f"UPDATE state SET runtime_ms = -1 WHERE {ONE}"),
    "online past the deadline": Defect(
        "state", "nothing is overdue", "state",
        f"UPDATE state SET mode = 'online', quiet_covered_ms = quiet_covered_ms - 3600000 WHERE {ONE}"),
    "a field of the state that was changed": Defect(
        "state as judged", "is as bronze says", "state",
        f"UPDATE state SET reboots = reboots + 1 WHERE part = 'device' AND {ONE}"),
    "a waiting message that was lost": Defect(
        "waiting", "none is lost", "state", "DELETE FROM state WHERE part = 'signal'"),
    "a message that waits twice": Defect(
        "waiting", "none is made up", "state", "INSERT INTO state SELECT * FROM state WHERE part = 'signal'"),
    "a lost key group": Defect(
        "snapshot", "every key group is there", "state", "DELETE FROM state WHERE part = 'group'"),
    "fewer devices than were counted": Defect(
        "snapshot", "as many devices as were counted", "state", f"DELETE FROM state WHERE part = 'device' AND {ONE}"),
    "a value that a device has lost": Defect(
        "state", "its values are there", "state", f"UPDATE state SET runtime_ms = NULL WHERE part = 'device' AND {ONE}"),
    "a device in another key group": Defect(
        "state", "is in its key group", "state", f"UPDATE state SET key_group = 1 WHERE part = 'device' AND {ONE}"),
    "a mode that nothing ends": Defect(
        "state", "its mode has an end", "state", f"UPDATE state SET mode = 'degraded', degraded_until = NULL WHERE {ONE}"),
    "a silence that is counted from later": Defect(
        "state", "covered as we listened", "state", f"UPDATE state SET quiet_covered_ms = quiet_covered_ms + 9000 WHERE {ONE}"),
    "a state older than it is said to be": Defect(
        "snapshot", "stands where it was taken", "taken", "UPDATE taken SET stated_newest = stated_newest + INTERVAL 1 SECOND"),
    "a gap that the state does not know": Defect(
        "snapshot", "listened as bronze says", "taken", "UPDATE taken SET listens_as_bronze = false"),
    "groups of two instants": Defect("snapshot", "all stand at one instant", "taken", "UPDATE taken SET worlds = 2"),
    "an older snapshot": Defect(
        "snapshot", "frontier does not run backwards", "taken",
        "UPDATE taken SET frontier_before = frontier + INTERVAL 1 SECOND"),
    "a snapshot that nobody took anew": Defect(
        "snapshot", "is recent", "taken", "UPDATE taken SET job_frontier = frontier + INTERVAL 49 HOUR"),
    "a column of another type": Defect(
        "columns", "as declared", "declared_columns", "UPDATE declared_columns SET stored = 'string' WHERE declared = 'long'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return judged_home(tmp_path_factory.mktemp("quality") / "home", eventful_history(SEED), DEPLOYMENT)


@pytest.fixture(scope="module")
def expectations(clean: Home) -> Expectations:
    return Expectations(clean.path / "aside", "planted")


def answers_of(expectations: Expectations, tables: OpenedTables, suite: Suite, **more: int) -> dict[str, ExpectationResult]:
    """Return by its name what came of each expectation of a suite, over the tables as they are now."""
    return {one.expectation.name: one for one in expectations.evaluate(suite, tables.frame(suite.rows), **more)}


@pytest.mark.parametrize("named", DEFECTS)
def test_a_planted_defect_is_caught_by_the_suite_that_should(named: str, clean: Home, expectations: Expectations) -> None:
    defect = DEFECTS[named]
    suite = NAMED[defect.suite]
    with opened_tables(clean) as (tables, made):
        if defect.table == "declared_columns":
            made.make(suite)
        plant(tables, defect.table, defect.sql)
        made.make(suite)
        answers = answers_of(expectations, tables, suite)
    found = answers[defect.expectation]
    assert (found.fault, found.failed > 0) == ("", True)
    assert found.shown
    assert {*suite.key} <= {*found.shown[0]}


def test_there_are_more_than_twenty_kinds_of_defects_and_every_law_has_one() -> None:
    laws = {(suite.name, one.name) for suite in SUITES for one in suite.expectations if one.form == "holds"}
    of_volume = {
        ("volume", one) for one in ("not half of usual", "not thrice as usual", "is fresh", "is heard each day")
    }  # planted below
    caught = {(one.suite, one.expectation) for one in DEFECTS.values()} | of_volume
    others = {("stream_health table", "key is unique"), ("state as judged", "is there"), ("state as judged", "is due")}
    assert len(DEFECTS) > 20
    assert laws - caught == others  # told apart by other suites, or by the same words


VOLUME = """
    CREATE TABLE copied AS SELECT * FROM messages LIMIT 0;
    INSERT INTO copied BY NAME
    SELECT site, 'heartbeat' AS kind, site AS device_id,
        TIMESTAMPTZ '2024-01-01 00:00:00Z' + INTERVAL (number * 20) SECOND AS received_at
    FROM range(1800) AS numbers(number), (VALUES ('steady'), ('drops'), ('floods'), ('stops')) AS sites(site)
    WHERE NOT (site = 'drops' AND number > 1620 AND number % 4 != 0) AND NOT (site = 'stops' AND number > 1700);
    INSERT INTO copied BY NAME
    SELECT 'floods' AS site, 'heartbeat' AS kind, 'floods' AS device_id,
        TIMESTAMPTZ '2024-01-01 09:00:05Z' + INTERVAL (number) SECOND AS received_at FROM range(3500) AS numbers(number);
    INSERT INTO copied BY NAME
    SELECT site, 'heartbeat' AS kind, site AS device_id,
        TIMESTAMPTZ '2024-01-01 10:00:00Z' - INTERVAL (hours + number) HOUR AS received_at
    FROM range(6) AS numbers(number), (VALUES ('dead', 26), ('rare', 20), ('gone', 190)) AS sites(site, hours);
    DROP VIEW messages;
    ALTER TABLE copied RENAME TO messages;
"""


def test_a_site_that_sends_little_or_much_or_nothing_is_reported(clean: Home, expectations: Expectations) -> None:
    suite = NAMED["volume"]
    with opened_tables(clean) as (tables, _):
        tables.connection.execute(VOLUME)
        plant(tables, "stand", "UPDATE stand SET landed = TIMESTAMPTZ '2024-01-01 10:00:00Z'")
        answers = answers_of(expectations, tables, suite)
    said = {name: sorted(row["site"] for row in one.shown) for name, one in answers.items()}
    volumes = {"not half of usual": ["drops", "stops"], "not thrice as usual": ["floods"], "is fresh": ["stops"]}
    assert said == {**volumes, "is heard each day": ["dead"]}
    assert {one.severity for one in suite.expectations} == {"warning"}


def test_a_clean_home_raises_nothing_and_says_so(clean: Home) -> None:
    report = run(clean)
    assert [one.sentence() for one in report.findings() if one.outcome in ("failed", "fault")] == []
    assert [one.suite for one in report.suite_runs if one.engine == ""] == []
    refuse(report, "nothing")
    assert [one["failed"] for one in quality_runs(clean, 5)] == [0]
    assert failed_rows(clean, 5) == []
    assert report.docs is not None
    assert report.docs.exists()
    rows = {one.suite: one.rows for one in report.suite_runs}
    told = ("transitions", "deadlines", "verdicts", "accounts", "listed", "clocks", "state", "waiting", "coverage spans")
    assert all(rows[name] for name in told), "the history has something of each"


def test_what_fails_is_named_and_kept_and_only_what_is_critical_shuts_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = judged_home(tmp_path / "home", eventful_history(SEED), DEPLOYMENT)
    DeltaTable(str(home.table(JUDGEMENTS.name))).delete("kind = 'transition' AND transition_no = 1")
    DeltaTable(str(home.table("coverage"))).delete("op = 'open'")
    monkeypatch.chdir(tmp_path)
    report = run(Home(Path("home")), ["transitions", "coverage spans"], keep=1)  # as the default home is: ".fleet"
    with refused("quality-gate-shut"):  # fmt: skip
        refuse(report, "the data is wrong")
    assert {one.suite for one in report.gate_failures()} == {"transitions"}
    kept = {(row["suite"], row["severity"]) for row in failed_rows(home, 1)}
    assert kept == {("transitions", "critical"), ("coverage spans", "warning")}
    row = failed_rows(home, 1)[-1]
    assert json.loads(row["row_key"]).keys() == {"device_id", "life", "transition_no"}
    warned = run(home, ["coverage spans"], keep=1)
    refuse(warned, "nothing")
    assert {path.name for path in (home.path / "quality" / "results").glob("*/*")} == {warned.run_id}
    assert [one["suites"] for one in quality_runs(home, 9)] == [1, 2], "the tables keep what was pruned from the pages"


def test_the_gate_names_a_device_whose_stored_state_was_damaged(tmp_path: Path) -> None:
    history = eventful_history(SEED)
    home = judged_home(tmp_path / "home", history, DEPLOYMENT)
    state = state_rows(history, DEPLOYMENT)
    sound = snapshot_state(home)
    assert sound is not None
    refuse(gate(home, sound), "nothing may be built on it")
    of_device = pc.fill_null(pc.equal(state["mode"], "offline"), False)
    broken = pc.if_else(of_device, "online", state["mode"])
    write_state(home, state.set_column(state.schema.get_field_index("mode"), "mode", broken))
    damaged = snapshot_state(home)
    assert damaged is not None
    with refused("quality-gate-shut"):
        refuse(gate(home, damaged), "nothing may be built on it")
    write_state(home, state.filter(pc.invert(of_device)))
    lost = snapshot_state(home)
    assert lost is not None
    with refused("quality-gate-shut"):
        refuse(gate(home, lost), "nothing may be built on it")


def test_bronze_that_cannot_be_judged_again_is_a_fault_and_shuts_the_gate(tmp_path: Path) -> None:
    home = judged_home(tmp_path / "home", eventful_history(SEED), DEPLOYMENT)
    row = {"device_id": "d", "site": "s", "kind": "ping", "clock": "device", "received_at_ms": START, "event_time_ms": START}
    arrival = {"origin": "mqtt", "bridge": "b", "segment": 2, "digest": 0, "device_hash": 0}
    delta.append(home, MESSAGES, delta.to_table(MESSAGES, [{**row, **arrival}]), "test", 2)
    report = run(home, ["messages table", "verdicts"])
    with refused("quality-gate-shut"):
        refuse(report, "the data is wrong")
    assert {one.suite for one in report.gate_failures()} == {"messages table", "verdicts"}


def test_a_home_whose_oldest_rows_are_gone_is_told_what_cannot_be_said(clean: Home, tmp_path: Path) -> None:
    home = judged_home(tmp_path / "home", eventful_history(SEED), DEPLOYMENT)
    (home.path / "kept.json").write_text(json.dumps({"messages": 1_700_000_000_000}))
    report = run(home, ["transitions", "verdicts"])
    assert [(one.suite, one.engine != "") for one in report.suite_runs] == [("transitions", True), ("verdicts", False)]
    results = delta.query(
        home, "SELECT DISTINCT why FROM quality_results WHERE outcome = 'skipped'", tables=[QUALITY_RESULTS.name]
    )
    [result] = results
    assert result["why"].startswith("bronze no longer has the first rows, and there is no snapshot")
    assert delta.query(home, "SELECT * FROM quality_failures", tables=[QUALITY_FAILURES.name]) == []


def test_no_more_rows_that_fail_are_fetched_than_are_shown(clean: Home, expectations: Expectations) -> None:
    suite = NAMED["messages table"]
    with opened_tables(clean) as (tables, _):
        plant(tables, "messages", "UPDATE messages SET kind = 'ping'")
        answers = answers_of(expectations, tables, suite, shown=3)
    found = answers["kind is known"]
    assert (len(found.shown), found.failed) == (3, found.rows)
