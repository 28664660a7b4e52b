"""Adaptive batching: live rows wait up to the hold time, a backlog and the first batch do not."""

from dataclasses import dataclass, field

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.bronze_source import BlockReader
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.adaptive_batching import (
    FEW_ROWS,
    NEWEST,
    BatchStart,
    hold_ms,
    landing_pause_s,
    trigger_ms,
    verdict_delay_ms,
)

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(60_000))]
HOLD_MS = 6_000


@dataclass
class Clock:
    """Monotonic and wall clock of a pacer, always equal."""

    wall_ms: int = 0
    log: DeltaLog = field(init=False)

    def at(self, version: int, after_ms: int) -> "Clock":
        """Set the clocks to an instant after a version was committed."""
        self.wall_ms = self.log.landed_ms(version) + after_ms
        return self

    def pacer(self) -> BatchStart:
        return BatchStart(self.log, HOLD_MS, lambda: self.wall_ms, lambda: self.wall_ms)


@pytest.fixture
def home(home: Home) -> Home:
    tables.create(home, MESSAGES)
    return home


@pytest.fixture
def clock(home: Home) -> Clock:
    clock = Clock()
    clock.log = DeltaLog(home.table(MESSAGES.name))
    return clock


def land(home: Home, newest_ms: int, rows: int = 1) -> int:
    """Commit rows as landing does; return the version."""
    table = tables.to_table(MESSAGES, [{"received_at_ms": newest_ms}] * rows)
    tables.append_of(home, MESSAGES, table, {"rows:bridge-1": rows, NEWEST: newest_ms})
    return tables.version(home.table(MESSAGES.name))


def live(home: Home, clock: Clock, rows: int = 1) -> int:
    """Land current rows and return their version; the commit has the time of the real clock."""
    import time

    version = land(home, time.time_ns() // 1_000_000, rows)
    clock.at(version, 0)
    return version


def test_live_rows_wait_until_the_first_has_waited_for_the_hold_time(home: Home, clock: Clock) -> None:
    begin = live(home, clock)
    pacer = clock.pacer()
    assert pacer.is_due(begin, begin), "first batch of a reader: the waiting time of its rows is unknown"
    began_ms = clock.wall_ms
    second = live(home, clock)
    clock.wall_ms = began_ms  # the first batch took no time
    assert not pacer.is_due(second, second)
    assert not pacer.is_due(second, live(home, clock)), "one more tick does not start a batch"
    clock.wall_ms = began_ms + HOLD_MS - 1
    assert not pacer.is_due(second, second + 1)
    clock.wall_ms += 1
    assert pacer.is_due(second, second + 1)


def test_hold_time_of_rows_that_land_during_a_batch_starts_at_their_landing(home: Home, clock: Clock) -> None:
    begin = live(home, clock)
    pacer = clock.pacer()
    assert pacer.is_due(begin, begin)
    second = live(home, clock)
    clock.at(second, HOLD_MS)
    assert pacer.is_due(second, second)


def test_duration_of_a_batch_is_part_of_the_hold_time(home: Home, clock: Clock) -> None:
    begin = live(home, clock)
    pacer = clock.pacer()
    assert pacer.is_due(begin, begin)
    began_ms = clock.wall_ms
    second = live(home, clock)
    clock.wall_ms = began_ms + 2_500  # the batch has ended
    waits_ms = HOLD_MS - 2_500 - (clock.wall_ms - clock.log.landed_ms(second))
    assert not pacer.is_due(second, second)
    clock.wall_ms += waits_ms - 1
    assert not pacer.is_due(second, second)
    clock.wall_ms += 1
    assert pacer.is_due(second, second)


def test_a_backlog_does_not_wait(home: Home, clock: Clock) -> None:
    begin = live(home, clock)
    old, many = clock.pacer(), clock.pacer()
    assert old.is_due(begin, begin) and many.is_due(begin, begin)
    second = live(home, clock, FEW_ROWS)
    assert many.is_due(second, second), "this many rows start a batch at once"
    third = land(home, clock.wall_ms - 60_000)
    assert clock.pacer().is_due(third, third)
    assert old.is_due(third, third), "its rows were received a minute before they landed"


def test_rows_are_not_held_without_a_hold_time_or_a_known_received_at(home: Home, clock: Clock) -> None:
    begin = live(home, clock)
    eager = BatchStart(clock.log, 0)
    assert eager.is_due(begin, begin) and eager.is_due(begin + 1, live(home, clock))
    pacer = clock.pacer()
    assert pacer.is_due(begin, begin)
    tables.append(home, MESSAGES, tables.to_table(MESSAGES, [{"received_at_ms": clock.wall_ms}]), "another program", 1)
    assert pacer.is_due(begin + 1, begin + 2), "its commit does not have the newest received_at"


def test_the_source_plans_no_batch_while_rows_are_held(home: Home, clock: Clock) -> None:
    begin = live(home, clock)
    options = {"path": str(home.table(MESSAGES.name)), "key_groups": "4", "hold_ms": "600000"}
    reader = BlockReader(options)
    assert reader.latestOffset({"version": begin}) == {"version": begin + 1}
    live(home, clock)
    assert reader.latestOffset({"version": begin + 1}) == {"version": begin + 1}
    assert BlockReader({**options, "through": str(begin + 2)}).latestOffset({"version": begin + 1}) == {"version": begin + 2}
    del options["hold_ms"]
    assert BlockReader(options).latestOffset({"version": begin + 1}) == {"version": begin + 2}


@pytest.mark.parametrize(
    ("lateness_ms", "setting_ms", "delay_ms"),
    [(60_000, 10_000, 10_000), (6_000, 10_000, 1_000), (600_000, 10_000, 10_000), (60_000, 500, 500), (60_000, 0, 0)],
)
def test_hold_time_and_landing_pause_fit_in_the_verdict_delay(lateness_ms: int, setting_ms: int, delay_ms: int) -> None:
    assert verdict_delay_ms(lateness_ms, setting_ms) == delay_ms
    assert hold_ms(delay_ms) + 1000 * landing_pause_s(delay_ms, 0) <= 0.9 * delay_ms


@pytest.mark.parametrize(
    ("hold", "batch_every", "interval", "held"),
    [(8_000, 200, 800, 8_000), (8_000, 1_000, 1_000, 8_000), (800, 1_000, 1_000, 0), (0, 200, 200, 0)],
)
def test_rows_are_held_only_if_the_trigger_interval_is_below_the_hold_time(
    hold: int, batch_every: int, interval: int, held: int
) -> None:
    assert trigger_ms(hold, batch_every) == (interval, held)
