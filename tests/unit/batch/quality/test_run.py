"""Quality suites by pandas: each planted defect is found by its suite, and a sound home passes."""

import json
from dataclasses import dataclass, replace
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
from fleetpulse.reports.operations.quality import failed_rows, quality_runs
from tests.support.histories.histories import START
from tests.support.homes.quality import NAMED, eventful_history, judged_home, opened_tables, plant, state_rows, write_state
from tests.support.refusals import refused

pytestmark = [
    pytest.mark.unit,
    pytest.mark.timeout(600),  # importing Great Expectations takes seconds
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from Great Expectations
]
pc: Any = pyarrow.compute  # its functions are made at run time, unknown to type checkers
DEPLOYMENT = Deployment(30_000, 20_000)
SEED = 5


@dataclass(frozen=True)
class Defect:
    """Change of a table by SQL, and the expectation that must fail."""

    suite: str
    expectation: str
    table: str
    sql: str


TRANSITION = "kind = 'transition'"
NEWEST = f"""device_id || life || transition_no = (
    SELECT device_id || life || transition_no FROM judgements WHERE {TRANSITION} ORDER BY event_time DESC LIMIT 1)"""
DEVICE = "device_id = (SELECT min(device_id) FROM state WHERE part = 'device' AND last_seen IS NOT NULL AND transition_no > 1)"
FIRST_LATE = "received_at = (SELECT min(received_at) FROM judgements WHERE kind = 'late')"
SPAN = "(SELECT min(received_at) FROM coverage WHERE op = 'close')"

DEFECTS = {
    "a lost transition": Defect(
        "transitions", "numbered without gap or repeat", "judgements",
        f"DELETE FROM judgements WHERE {TRANSITION} AND transition_no = 1"),
    "a duplicated transition": Defect(
        "judgements table", "key is unique", "judgements",
        f"INSERT INTO judgements SELECT * FROM judgements WHERE {TRANSITION} LIMIT 1"),
    "a forbidden transition": Defect(
        "transitions", "allowed by the table", "judgements",
        "UPDATE judgements SET to_mode = 'decommissioned' WHERE trigger = 'signal'"),
    "a wrong previous mode": Defect(
        "transitions", "starts in the previous mode", "judgements",
        "UPDATE judgements SET from_mode = 'flagged' WHERE trigger = 'silence'"),
    "a gap in the transition numbers": Defect(
        "transitions", "numbered without gap or repeat", "judgements",
        f"UPDATE judgements SET transition_no = transition_no + 7 WHERE {NEWEST}"),
    "transitions out of order": Defect(
        "transitions", "in order of time", "judgements",
        f"UPDATE judgements SET event_time = life - INTERVAL 1 HOUR WHERE {NEWEST}"),
    "a transition in the future": Defect(
        "transitions", "not beyond bronze", "judgements",
        f"UPDATE judgements SET event_time = TIMESTAMPTZ '2100-01-01 00:00:00+00' WHERE {NEWEST}"),
    "a signal seen after the transition": Defect(
        "transitions", "last seen is not later", "judgements",
        f"UPDATE judgements SET last_seen = event_time + INTERVAL 1 SECOND WHERE {TRANSITION} AND trigger = 'silence'"),
    "a decreasing runtime": Defect(
        "transitions", "runtime never decreases", "judgements", f"UPDATE judgements SET runtime_ms = -1 WHERE {NEWEST}"),
    "a verdict without a policy": Defect(
        "transitions", "names its policy", "judgements", f"UPDATE judgements SET policy_version = NULL WHERE {NEWEST}"),
    "an offline transition one second late": Defect(
        "deadlines", "is at its deadline", "judgements",
        f"UPDATE judgements SET event_time = event_time + INTERVAL 1 SECOND WHERE trigger = 'silence' AND {TRANSITION}"),
    "an offline transition one second early": Defect(
        "deadlines", "is at its deadline", "judgements",
        f"UPDATE judgements SET event_time = event_time - INTERVAL 1 SECOND WHERE trigger = 'silence' AND {TRANSITION}"),
    "a lost newest transition": Defect(
        "verdicts", "none is missing", "judgements", f"DELETE FROM judgements WHERE {NEWEST}"),
    "an invented transition": Defect(
        "verdicts", "none is extra", "judgements",
        f"INSERT INTO judgements SELECT * REPLACE ('nobody' AS device_id) FROM judgements WHERE {TRANSITION} LIMIT 1"),
    "a wrong class": Defect(
        "verdicts", "none is extra", "judgements", f"UPDATE judgements SET device_class = 'other' WHERE {NEWEST}"),
    "a wrong runtime": Defect(
        "verdicts", "none is extra", "judgements", f"UPDATE judgements SET runtime_ms = runtime_ms + 1 WHERE {NEWEST}"),
    "a message neither judged nor listed": Defect(
        "accounts", "none is missing", "judgements", f"DELETE FROM judgements WHERE kind = 'late' AND {FIRST_LATE}"),
    "an unlisted duplicate": Defect(
        "accounts", "none is missing", "judgements", "DELETE FROM judgements WHERE kind = 'duplicate'"),
    "a message listed twice": Defect(
        "accounts", "none is extra", "judgements",
        f"INSERT INTO judgements SELECT * FROM judgements WHERE kind = 'late' AND {FIRST_LATE} LIMIT 1"),
    "a listed message that is not in bronze": Defect(
        "listed", "is in bronze", "messages",
        "DELETE FROM messages WHERE received_at = (SELECT min(received_at) FROM judgements WHERE kind = 'late')"),
    "a message listed without a reason": Defect(
        "listed", "has a reason", "judgements", "UPDATE judgements SET reason = NULL WHERE kind = 'late'"),
    "a late message with negative lateness": Defect(
        "listed", "has its lateness", "judgements", "UPDATE judgements SET late_by_ms = -1 WHERE kind = 'late'"),
    "an unlisted fast clock": Defect(
        "clocks", "is listed", "judgements", "DELETE FROM judgements WHERE kind IN ('clock', 'duplicate', 'after_decommission')"),
    "a null key": Defect(
        "messages table", "device_id is present", "messages", "UPDATE messages SET device_id = NULL WHERE kind = 'heartbeat'"),
    "an unknown kind of message": Defect(
        "messages table", "kind is known", "messages", "UPDATE messages SET kind = 'ping' WHERE kind = 'heartbeat'"),
    "an unknown mode": Defect(
        "judgements table", "to_mode is known", "judgements", f"UPDATE judgements SET to_mode = 'asleep' WHERE {NEWEST}"),
    "a quarantined message without a reason": Defect(
        "quarantine table", "reason is present", "quarantine",
        "INSERT INTO quarantine BY NAME SELECT 'b' AS bridge, 1 AS place, 'fleet/x' AS topic"),
    "a message quarantined twice": Defect(
        "quarantine table", "key is unique", "quarantine",
        "INSERT INTO quarantine BY NAME SELECT 'b' AS bridge, 1 AS place, 'json' AS reason FROM range(2)"),
    "a message lost from bronze": Defect(
        "conservation", "no message is missing", "messages",
        "DELETE FROM messages WHERE received_at = (SELECT min(received_at) FROM messages)"),
    "a duplicated message in bronze": Defect(
        "conservation", "no message is extra", "messages", "INSERT INTO messages SELECT * FROM messages LIMIT 1"),
    "a lost quarantined message": Defect(
        "conservation", "none is missing in quarantine", "quarantine", "DELETE FROM quarantine"),
    "a lost line of a recording": Defect(
        "recordings", "no line is missing", "messages",
        "UPDATE messages SET recording = 'r', line = 2 + (SELECT count(*) FROM messages) WHERE kind = 'tick' OR true"),
    "a recording line that landed twice": Defect(
        "recordings", "no line is repeated", "messages", "UPDATE messages SET recording = 'r', line = 0"),
    "a coverage gap closed without being opened": Defect(
        "coverage spans", "closes an open gap", "coverage", "DELETE FROM coverage WHERE op = 'open'"),
    "a coverage gap that ends before its start": Defect(
        "coverage spans", "ends after its start", "coverage",
        "UPDATE coverage SET \"at\" = \"at\" - INTERVAL 1 HOUR WHERE op = 'close'"),
    "overlapping coverage gaps": Defect(
        "coverage spans", "gaps do not overlap", "coverage",
        "UPDATE coverage SET \"at\" = \"at\" - INTERVAL 2 MINUTE WHERE op = 'open'"),
    "a coverage gap that is never closed": Defect(
        "coverage spans", "is closed", "coverage",
        "UPDATE coverage SET op = 'open', received_at = received_at - INTERVAL 2 HOUR"),
    "a retraction without a transition": Defect(
        "amendments", "retracts an emitted transition", "judgements",
        "INSERT INTO judgements BY NAME SELECT 'retract' AS kind, 'd' AS device_id, 9 AS transition_no, 1 AS amendment_no"),
    "a lost amendment": Defect(
        "amendments", "numbered without gap or repeat", "judgements",
        "INSERT INTO judgements BY NAME SELECT 'add' AS kind, 'd' AS device_id, 2 AS amendment_no"),
    "a device lost from the state": Defect(
        "state", "is not missing", "state", f"DELETE FROM state WHERE part = 'device' AND {DEVICE}"),
    "an unknown device in the state": Defect(
        "state", "is known", "state",
        f"INSERT INTO state SELECT * REPLACE ('nobody' AS device_id) FROM state WHERE part = 'device' AND {DEVICE}"),
    "a duplicated device in the state": Defect(
        "state", "is unique", "state", f"INSERT INTO state SELECT * FROM state WHERE part = 'device' AND {DEVICE}"),
    "an unknown mode in the state": Defect("state", "mode is known", "state", f"UPDATE state SET mode = 'asleep' WHERE {DEVICE}"),
    "a mode that differs from the transition": Defect(
        "state", "mode equals that of its transition", "state", f"UPDATE state SET mode = 'updating' WHERE {DEVICE}"),
    "a stale device": Defect(
        "state", "is not stale", "state",
        f"UPDATE state SET transition_no = transition_no - 1 WHERE part = 'device' AND {DEVICE}"),
    "a device ahead of the frontier": Defect(
        "state", "is not ahead", "state", f"UPDATE state SET last_seen = TIMESTAMPTZ '2100-01-01 00:00:00+00' WHERE {DEVICE}"),
    "silence counted from another instant": Defect(
        "state", "silence counts from the last signal", "state",
        f"UPDATE state SET last_seen = last_seen - INTERVAL 1 SECOND WHERE {DEVICE}"),
    "a last signal that is not in bronze": Defect(
        "state", "last seen is the newest signal judged", "state",
        "UPDATE state SET last_seen = last_seen - INTERVAL 1 SECOND, quiet_since = quiet_since - INTERVAL 1 SECOND "
        f"WHERE {DEVICE}"),
    "a lost runtime": Defect(
        "state", "runtime includes that of its transition", "state", f"UPDATE state SET runtime_ms = -1 WHERE {DEVICE}"),
    "online past the deadline": Defect(
        "state", "no deadline is overdue", "state",
        f"UPDATE state SET mode = 'online', quiet_covered_ms = quiet_covered_ms - 3600000 WHERE {DEVICE}"),
    "a changed field of the state": Defect(
        "state as judged", "equals the expected device", "state",
        f"UPDATE state SET reboots = reboots + 1 WHERE part = 'device' AND {DEVICE}"),
    "a lost pending message": Defect(
        "pending messages", "none is missing", "state", "DELETE FROM state WHERE part = 'signal'"),
    "a duplicated pending message": Defect(
        "pending messages", "none is extra", "state", "INSERT INTO state SELECT * FROM state WHERE part = 'signal'"),
    "a lost key group": Defect(
        "snapshot", "has every key group", "state", "DELETE FROM state WHERE part = 'group'"),
    "fewer devices than counted": Defect(
        "snapshot", "has the counted devices", "state", f"DELETE FROM state WHERE part = 'device' AND {DEVICE}"),
    "a missing value of a device": Defect(
        "state", "has its required values", "state", f"UPDATE state SET runtime_ms = NULL WHERE part = 'device' AND {DEVICE}"),
    "a device in another key group": Defect(
        "state", "is in its key group", "state", f"UPDATE state SET key_group = 1 WHERE part = 'device' AND {DEVICE}"),
    "a mode without an end": Defect(
        "state", "temporary mode has an end", "state",
        f"UPDATE state SET mode = 'degraded', degraded_until = NULL WHERE {DEVICE}"),
    "wrong covered time of a silence": Defect(
        "state", "covered time follows from gaps", "state",
        f"UPDATE state SET quiet_covered_ms = quiet_covered_ms + 9000 WHERE {DEVICE}"),
    "a state older than its metadata": Defect(
        "snapshot", "position equals that of its checkpoint", "checked",
        "UPDATE checked SET stated_newest_received = stated_newest_received + INTERVAL 1 SECOND"),
    "a coverage gap that is not in the state": Defect(
        "snapshot", "coverage follows from bronze", "checked", "UPDATE checked SET follows_from_bronze = false"),
    "key groups at different instants": Defect(
        "snapshot", "key groups are at one instant", "checked", "UPDATE checked SET contexts = 2"),
    "a frontier older than that of the previous snapshot": Defect(
        "snapshot", "frontier never decreases", "checked",
        "UPDATE checked SET frontier_before = frontier + INTERVAL 1 SECOND"),
    "an outdated snapshot": Defect(
        "snapshot", "is recent", "checked", "UPDATE checked SET job_frontier = frontier + INTERVAL 49 HOUR"),
    "a column of another type": Defect(
        "columns", "as declared", "declared_columns", "UPDATE declared_columns SET stored = 'string' WHERE declared = 'long'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return judged_home(tmp_path_factory.mktemp("quality") / "home", eventful_history(SEED), DEPLOYMENT)


@pytest.fixture(scope="module")
def expectations(clean: Home) -> Expectations:
    return Expectations(clean.path / "aside", "planted")


def results_of(expectations: Expectations, tables: OpenedTables, suite: Suite, **more: int) -> dict[str, ExpectationResult]:
    """Return the result of each expectation of a suite by name, for the present tables."""
    return {one.expectation.name: one for one in expectations.evaluate(suite, tables.frame(suite.rows), **more)}


@pytest.mark.parametrize("defect_name", DEFECTS)
def test_planted_defect_is_found_by_its_suite(defect_name: str, clean: Home, expectations: Expectations) -> None:
    defect = DEFECTS[defect_name]
    suite = NAMED[defect.suite]
    with opened_tables(clean) as (tables, derived):
        if defect.table == "declared_columns":
            derived.make(suite)
        plant(tables, defect.table, defect.sql)
        derived.make(suite)
        planted = replace(suite, expectations=tuple(one for one in suite.expectations if one.name == defect.expectation))
        [result] = results_of(expectations, tables, planted).values()
    assert (result.fault, result.failed > 0) == ("", True)
    assert result.shown
    assert {*suite.key} <= {*result.shown[0]}


def test_every_expectation_has_a_planted_defect() -> None:
    expectations = {(suite.name, one.name) for suite in SUITES for one in suite.expectations if one.form == "holds"}
    of_volume = {
        ("volume", one) for one in ("at least half of the median", "at most three times the median", "is fresh", "sends each day")
    }  # planted in another test
    covered = {(one.suite, one.expectation) for one in DEFECTS.values()} | of_volume
    uncovered = {("state as judged", "is present"), ("state as judged", "is expected")}
    uncovered |= {(f"{table} table", "key is unique") for table in ("stream_health", "sessions", "vitals", "commands")}
    assert len(DEFECTS) > 20
    assert expectations - covered == uncovered  # their defects are those of other suites


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


def test_site_with_unusual_volume_is_reported(clean: Home, expectations: Expectations) -> None:
    suite = NAMED["volume"]
    with opened_tables(clean) as (tables, _):
        tables.connection.execute(VOLUME)
        plant(tables, "job", "UPDATE job SET landed_before = TIMESTAMPTZ '2024-01-01 10:00:00Z'")
        results = results_of(expectations, tables, suite)
    failing_sites = {name: sorted(row["site"] for row in one.shown) for name, one in results.items()}
    volumes = {
        "at least half of the median": ["drops", "stops"],
        "at most three times the median": ["floods"],
        "is fresh": ["stops"],
    }
    assert failing_sites == {**volumes, "sends each day": ["dead"]}
    assert {one.severity for one in suite.expectations} == {"warning"}


def test_sound_home_has_no_failures(clean: Home) -> None:
    report = run(clean)
    assert [one.sentence() for one in report.findings() if one.outcome in ("failed", "fault")] == []
    assert [one.suite for one in report.suite_runs if one.engine == ""] == []
    refuse(report, "nothing")
    assert [one["failed"] for one in quality_runs(clean, 5)] == [0]
    assert failed_rows(clean, 5) == []
    assert report.docs is not None
    assert report.docs.exists()
    rows = {one.suite: one.rows for one in report.suite_runs}
    names = (
        "transitions",
        "deadlines",
        "verdicts",
        "accounts",
        "listed",
        "clocks",
        "state",
        "pending messages",
        "coverage spans",
    )
    assert all(rows[name] for name in names), "the history has rows for each of these suites"


def test_failures_are_recorded_and_only_critical_ones_shut_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = judged_home(tmp_path / "home", eventful_history(SEED), DEPLOYMENT)
    DeltaTable(str(home.table(JUDGEMENTS.name))).delete("kind = 'transition' AND transition_no = 1")
    DeltaTable(str(home.table("coverage"))).delete("op = 'open'")
    monkeypatch.chdir(tmp_path)
    relative = Home(Path("home"))  # as the default home ".fleet"
    report = run(relative, ["transitions", "coverage spans"], keep=1)
    with refused("quality-gate-shut"):  # fmt: skip
        refuse(report, "the data is wrong")
    assert {one.suite for one in report.gate_failures()} == {"transitions"}
    recorded = {(row["suite"], row["severity"]) for row in failed_rows(home, 1)}
    assert recorded == {("transitions", "critical"), ("coverage spans", "warning")}
    row = failed_rows(home, 1)[-1]
    assert json.loads(row["row_key"]).keys() == {"device_id", "life", "transition_no"}
    warning_run = run(home, ["coverage spans"], keep=1)
    refuse(warning_run, "nothing")
    assert {path.name for path in (home.path / "quality" / "results").glob("*/*")} == {warning_run.run_id}
    assert [one["suites"] for one in quality_runs(home, 9)] == [1, 2], "the tables keep runs whose pages were pruned"


def test_gate_refuses_a_state_with_damaged_or_lost_devices(tmp_path: Path) -> None:
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


def test_bronze_that_cannot_be_replayed_shuts_the_gate(tmp_path: Path) -> None:
    home = judged_home(tmp_path / "home", eventful_history(SEED), DEPLOYMENT)
    row = {"device_id": "d", "site": "s", "kind": "ping", "clock": "device", "received_at_ms": START, "event_time_ms": START}
    arrival = {"origin": "mqtt", "bridge": "b", "segment": 2, "digest": 0, "device_hash": 0}
    delta.append(home, MESSAGES, delta.to_table(MESSAGES, [{**row, **arrival}]), "test", 2)
    report = run(home, ["messages table", "verdicts"])
    with refused("quality-gate-shut"):
        refuse(report, "the data is wrong")
    assert {one.suite for one in report.gate_failures()} == {"messages table", "verdicts"}


def test_suite_that_needs_removed_rows_is_skipped_with_a_reason(clean: Home, tmp_path: Path) -> None:
    home = judged_home(tmp_path / "home", eventful_history(SEED), DEPLOYMENT)
    (home.path / "kept.json").write_text(json.dumps({"messages": 1_700_000_000_000}))
    report = run(home, ["transitions", "verdicts"])
    assert [(one.suite, one.engine != "") for one in report.suite_runs] == [("transitions", True), ("verdicts", False)]
    skipped = delta.query(
        home, "SELECT DISTINCT why FROM quality_results WHERE outcome = 'skipped'", tables=[QUALITY_RESULTS.name]
    )
    [result] = skipped
    assert result["why"].startswith("bronze no longer has the first rows, and there is no snapshot")
    assert delta.query(home, "SELECT * FROM quality_failures", tables=[QUALITY_FAILURES.name]) == []


def test_only_the_shown_failed_rows_are_fetched(clean: Home, expectations: Expectations) -> None:
    suite = NAMED["messages table"]
    with opened_tables(clean) as (tables, _):
        plant(tables, "messages", "UPDATE messages SET kind = 'ping'")
        results = results_of(expectations, tables, suite, shown=3)
    result = results["kind is known"]
    assert (len(result.shown), result.failed) == (3, result.rows)
