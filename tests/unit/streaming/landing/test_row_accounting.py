"""Row accounting of landing: every row is counted, and a quality suite finds missing rows."""

import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from deltalake import DeltaTable

from batch.quality.derived_tables import DerivedTables
from batch.quality.run import FAILED, PASSED, SKIPPED, Finding, run
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.tables import MESSAGES, QUARANTINE, Table
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.segments import SegmentRow
from fleetpulse.io.quality.suite_inputs import opened
from fleetpulse.io.tables import tables as delta
from fleetpulse.io.tables.row_accounting import IngestCounters, read_counters
from streaming.landing import landing as landing_module
from streaming.landing.landing import Landing
from tests.support.homes.landing import heartbeats, land_all, landed, write
from tests.support.homes.maintained import DAY_MS, DAYS, KEEP, four_days, run_maintain
from tests.support.homes.quality import NAMED, eventful_history, judged_home, state_rows

pytestmark = [
    pytest.mark.unit,
    pytest.mark.timeout(600),  # the import of the library takes seconds
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of that library
]
BRIDGE = "bridge-1"
DEPLOYMENT = Deployment(30_000, 20_000)
BEGIN_MS = 1_700_000_000_000
REFUSED = 2  # refused rows of a segment of `mixed`


def mixed(number: int) -> list[SegmentRow]:
    """Return six rows: three signals, two refused ones, and the end line of a recording."""
    at_ms = BEGIN_MS + 1_000 * number
    return [
        *heartbeats(at_ms, 3),
        SegmentRow(at_ms + 3, "fleet/oslo/d/heartbeat", b"{", "mqtt"),
        SegmentRow(at_ms + 4, "replay/other", b"{}", "replay", f"r{number}", 0),
        SegmentRow(at_ms + 5, f"replay/r{number}", b"", "replay", f"r{number}", 1),
    ]


def counted(home: Home) -> IngestCounters | None:
    return read_counters(DeltaTable(str(home.table(MESSAGES.name))))


def quarantined(home: Home) -> int:
    return delta.query(home, "SELECT count(*) AS rows FROM quarantine", tables=[QUARANTINE.name])[0]["rows"]


def kill_before_commit(table: str, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a step of a landing that is killed before its commit to a table."""
    append = delta.append_of

    def append_or_kill(of_home: Home, to_table: object, *rest: object) -> None:
        if getattr(to_table, "name", "") == table:
            raise KeyboardInterrupt
        append(of_home, to_table, *rest)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patched:
        patched.setattr(landing_module.tables, "append_of", append_or_kill)
        with pytest.raises(KeyboardInterrupt):
            Landing(home).step()


def findings(home: Home) -> dict[str, Finding]:
    """Run the suite ``conservation``; return its findings by expectation."""
    [suite_run] = run(home, ["conservation"]).suite_runs
    return {one.expectation: one for one in suite_run.findings}


def failures(home: Home) -> list[str]:
    return sorted(name for name, one in findings(home).items() if one.outcome == FAILED)


def skip_reason(home: Home) -> str:
    found = findings(home).values()
    assert {one.outcome for one in found} == {SKIPPED}
    return {one.why for one in found}.pop()


# ---- counting


def test_every_row_is_a_message_or_refused_except_the_end_line_of_a_recording(home: Home) -> None:
    write(home, BRIDGE, 1, mixed(1))
    Landing(home).step()
    assert counted(home) == IngestCounters(5, REFUSED)
    assert (landed(home), quarantined(home)) == (3, REFUSED)


def test_restarted_landing_continues_the_counters(home: Home) -> None:
    for number in range(1, 4):
        write(home, BRIDGE, number, mixed(number))
        Landing(home).step()
    landing = Landing(home)
    assert landing.step() == 0
    write(home, BRIDGE, 4, mixed(4))
    assert landing.step() == 1
    assert counted(home) == landing.counted == IngestCounters(20, 4 * REFUSED)
    assert failures(home) == []


@pytest.mark.parametrize("table", [QUARANTINE.name, MESSAGES.name])
def test_rows_are_counted_once_wherever_landing_is_killed(home: Home, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home, BRIDGE, 1, mixed(1))
    Landing(home).step()
    write(home, BRIDGE, 2, mixed(2))
    for _ in range(2):  # processes
        kill_before_commit(table, home, monkeypatch)
    assert counted(home) == IngestCounters(5, REFUSED)
    assert quarantined(home) == (2 * REFUSED if table == MESSAGES.name else REFUSED)
    assert failures(home) == [], "quarantine may be a step ahead"
    write(home, BRIDGE, 3, mixed(3))
    land_all(home)
    assert counted(home) == IngestCounters(15, 3 * REFUSED)
    assert failures(home) == []


def test_the_rows_of_several_bridges_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    home.prepare(None)
    home.divide({"north": ["oslo"]})
    home.segments_of("north").mkdir(parents=True)
    monkeypatch.setattr(landing_module, "COMMIT_ROWS", 4)  # so that a segment lands in parts
    now_ms = time.time_ns() // 1_000_000
    for number in range(1, 4):
        write(home, BRIDGE, number, [row._replace(received_at_ms=now_ms - 9_000 + 10 * number) for row in mixed(number)])
        late = [row._replace(received_at_ms=row.received_at_ms - BEGIN_MS + now_ms - 80_000) for row in mixed(number)]
        write(home, "north", number, late)  # lands after newer rows
        land_all(home)
    assert counted(home) == IngestCounters(30, 6 * REFUSED)
    assert (landed(home), quarantined(home), failures(home)) == (18, 6 * REFUSED, [])


def test_counters_of_an_older_home_start_from_its_tables(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(IngestCounters, "numbers", lambda _: {})
        write(home, BRIDGE, 1, mixed(1))
        Landing(home).step()
        write(home, BRIDGE, 2, mixed(2))
        kill_before_commit(MESSAGES.name, home, monkeypatch)  # quarantine is ahead, and its new rows are not yet counted
        assert counted(home) is None
        assert skip_reason(home).startswith("bronze has no count of the rows taken")
    assert (landed(home), quarantined(home)) == (3, 2 * REFUSED)
    Landing(home).step()
    assert counted(home) == IngestCounters(10, 2 * REFUSED)
    assert failures(home) == []


# ---- the quality suite


def test_lost_message_without_effect_is_found_by_conservation_only(tmp_path: Path) -> None:
    history = eventful_history(5)
    judgements, state = replay(history, DEPLOYMENT), state_rows(history, DEPLOYMENT)

    def has_no_effect(index: int) -> bool:
        without = history[:index] + history[index + 1 :]
        return replay(without, DEPLOYMENT) == judgements and state_rows(without, DEPLOYMENT).equals(state)

    lost = next(index for index in range(1, len(history) - 1) if has_no_effect(index))
    home = judged_home(tmp_path / "home", history[:lost] + history[lost + 1 :], DEPLOYMENT, judgements)
    counters = IngestCounters(len(history) + 1, 1)
    delta.append_of(home, MESSAGES, delta.from_columns(MESSAGES, {}, 0), counters.numbers())
    report = run(home)
    assert [(one.suite, one.expectation) for one in report.findings() if one.outcome != "passed"] == [
        ("conservation", "no message is missing")
    ]
    [found] = report.gate_failures()
    assert found.sentence() == f'suite "conservation": 1 row fails "no message is missing", first: taken {counters.taken}'
    row = {"quarantined": 1, "in_messages": len(history) - 1, "removed_messages": 0, "in_quarantine": 1, "removed_quarantine": 0}
    assert [one for _, one in found.examples] == [row]


def test_lost_rows_of_quarantine_and_rows_of_another_writer_are_found(home: Home) -> None:
    write(home, BRIDGE, 1, mixed(1))
    Landing(home).step()
    DeltaTable(str(home.table(QUARANTINE.name))).delete("reason = 'json'")
    assert failures(home) == ["none is missing in quarantine"]
    delta.append(home, MESSAGES, delta.to_table(MESSAGES, [{"received_at_ms": BEGIN_MS}]), "another", 1)
    assert failures(home) == ["no message is extra", "none is missing in quarantine"]


def test_rows_that_land_during_a_run_of_the_suite_fail_no_expectation(home: Home) -> None:
    write(home, BRIDGE, 1, mixed(1))
    Landing(home).step()
    suite = NAMED["conservation"]
    with opened(home) as tables:
        write(home, BRIDGE, 2, mixed(2))
        Landing(home).step()
        derived = DerivedTables(home, tables, None, None)
        derived.make(suite)
        [row] = tables.arrow(suite.rows).to_pylist()
    assert (row["taken"], row["in_messages"], row["in_quarantine"]) == (5, 3, REFUSED)


def test_compaction_loses_no_row_and_rows_removed_by_retention_are_counted(tmp_path: Path) -> None:
    home = four_days(tmp_path / "home")
    counters = IngestCounters(landed(home), 0)
    delta.append_of(home, MESSAGES, delta.from_columns(MESSAGES, {}, 0), counters.numbers())
    assert [step.did for step in run_maintain(home)].count("join") == DAYS
    assert {one.outcome for one in findings(home).values()} == {PASSED}
    for days in (2, 1):  # the second retention removes what the first left
        assert [step.did for step in run_maintain(home, replace(KEEP, messages_ms=days * DAY_MS))].count("remove") == 1
        assert {one.outcome for one in findings(home).values()} == {PASSED}
    assert 0 < landed(home) < counters.taken
    assert counted(home) == counters
    DeltaTable(str(home.table(MESSAGES.name))).delete("kind = 'policy'")
    assert failures(home) == ["no message is missing"]


def test_rows_removed_from_quarantine_by_retention_are_counted(home: Home) -> None:
    for number in (1, 2):
        write(
            home, BRIDGE, number, [row._replace(received_at_ms=row.received_at_ms + number * 3 * DAY_MS) for row in mixed(number)]
        )
        Landing(home).step()
    steps = run_maintain(home, replace(KEEP, quarantine_ms=DAY_MS))
    assert [(step.table, step.rows) for step in steps if step.did == "remove"] == [(QUARANTINE.name, REFUSED)]
    assert (quarantined(home), failures(home)) == (REFUSED, [])
    DeltaTable(str(home.table(QUARANTINE.name))).delete("reason = 'json'")
    assert failures(home) == ["none is missing in quarantine"]


def test_counters_that_start_after_a_retention_include_the_removed_rows(tmp_path: Path) -> None:
    home = four_days(tmp_path / "home")
    run_maintain(home, replace(KEEP, messages_ms=DAY_MS))
    left = landed(home)
    assert left < Landing(home).counted.taken
    write(home, BRIDGE, 1, [row._replace(received_at_ms=row.received_at_ms + 99 * DAY_MS) for row in mixed(1)])
    Landing(home).step()
    assert landed(home) == left + 3
    assert {one.outcome for one in findings(home).values()} == {PASSED}


def test_rows_that_land_while_the_tables_are_opened_fail_no_expectation(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home, BRIDGE, 1, mixed(1))
    Landing(home).step()
    open_newest = delta.newest
    numbers = count(2)

    def land_and_open(of_home: Home, table: Table) -> DeltaTable | None:
        with monkeypatch.context() as patched:
            patched.setattr(delta, "newest", open_newest)
            write(of_home, BRIDGE, number := next(numbers), mixed(number))
            Landing(of_home).step()
        return open_newest(of_home, table)

    with monkeypatch.context() as patched:
        patched.setattr(delta, "newest", land_and_open)
        with opened(home) as tables:
            DerivedTables(home, tables, None, None).make(NAMED["conservation"])
            [row] = tables.arrow(NAMED["conservation"].rows).to_pylist()
    assert row["taken"] > 10
    assert [row[name] for name in row if name.startswith("no")] == [True] * 3


def test_retention_during_a_run_of_the_suite_fails_no_expectation(tmp_path: Path) -> None:
    home = four_days(tmp_path / "home")
    delta.append_of(home, MESSAGES, delta.from_columns(MESSAGES, {}, 0), IngestCounters(landed(home), 0).numbers())
    suite = NAMED["conservation"]
    with opened(home) as tables:
        derived = DerivedTables(home, tables, None, None)
        assert derived.skip_reason(suite) == ""
        steps = run_maintain(home, replace(KEEP, messages_ms=DAY_MS, replaced_ms=DAY_MS))
        assert [step.did for step in steps].count("remove") == 1
        derived.make(suite)
        [row] = tables.arrow(suite.rows).to_pylist()
        assert derived.skip_reason_after(suite) == ""
    assert row["taken"] == row["in_messages"] > landed(home)
    assert [row[name] for name in row if name.startswith("no")] == [True] * 3
