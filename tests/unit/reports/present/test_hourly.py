"""Table of the modes by hour: written by maintenance, exactly once, and read with newer rows."""

import os
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from batch.maintenance.maintain import maintain
from batch.maintenance.plan import Keep
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import DEVICE_CURRENT, MODE_HOURLY_SITE
from fleetpulse.core.times import HOUR_MS
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.tables import tables
from fleetpulse.reports.frontiers import judged_frontier_ms
from fleetpulse.reports.history.time_travel import Moment, fleet
from fleetpulse.reports.present.hourly import is_kept
from fleetpulse.reports.present.kept import keep_present, open_present
from fleetpulse.reports.present.over_time import modes_over_time
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.homes import RegisteredHome

pytestmark = pytest.mark.unit
RULES: dict[str, Any] = {"rules": {"timeout": "30m", "forget_after": "4h"}}
IN_FORCE = row(0, "fleet/_/_/policy", policy=parse_policy(RULES).normalised(), effective_from_s=-1000)
HOUR_S: Final = HOUR_MS // 1000
KEEP: Final = Keep(None, None, None, None, None, None, None, None, 0)


class _Live(RegisteredHome):
    """A judged home with a registry."""

    def __init__(self, path: Path) -> None:
        super().__init__(path / "home", Deployment(10_000))

    def keep(self) -> int | None:
        return keep_present(self.home, judged_frontier_ms(self.home))

    def shown(self) -> list[dict[str, Any]]:
        frontier_ms = judged_frontier_ms(self.home)
        return modes_over_time(self.home, frontier_ms, START - HOUR_MS, START + 1_000 * HOUR_MS)

    def defined(self) -> list[dict[str, Any]]:
        frontier_ms = judged_frontier_ms(self.home)
        assert frontier_ms is not None
        found: list[dict[str, Any]] = []
        for hour_ms in range((START - HOUR_MS) // HOUR_MS * HOUR_MS, frontier_ms + 1, HOUR_MS):
            counted = Counter(one["mode"] for one in fleet(self.home, Moment(hour_ms + HOUR_MS - 1, judged_to_ms=frontier_ms)))
            found.append({"hour_ms": hour_ms, "devices": dict(sorted(counted.items()))})
        return found

    def is_kept(self) -> bool:
        with open_present(self.home, judged_frontier_ms(self.home)) as present:
            return is_kept(self.home, present)

    def version(self) -> int:
        return tables.version(self.home.table(MODE_HOURLY_SITE.name))


@pytest.fixture
def live(tmp_path: Path) -> _Live:
    made = _Live(tmp_path)
    registered = row(5, "fleet/site/d/registry", op="add", effective_from_s=2 * HOUR_S)
    made.batch(IN_FORCE, registered, signal(10, "a"), signal(20, "b"), signal(HOUR_S, "a"), tick(2 * HOUR_S + 60))
    return made


def test_modes_by_hour_are_the_kept_ones_with_newer_transitions(live: _Live) -> None:
    assert live.keep() == 3
    assert live.is_kept() and live.shown() == live.defined()
    live.batch(signal(3 * HOUR_S, "a"), signal(3 * HOUR_S + 5, "d"), tick(4 * HOUR_S))
    assert live.shown() == live.defined()
    live.batch(signal(6 * HOUR_S + 60, "new"), tick(9 * HOUR_S))
    assert live.shown() == live.defined()
    assert live.shown()[-1]["devices"] == {"forgotten": 3, "offline": 1}
    assert len(live.shown()) == 11


def test_counts_are_of_one_site_and_class(live: _Live) -> None:
    frontier_ms = judged_frontier_ms(live.home)
    [hour] = modes_over_time(live.home, frontier_ms, START, START + 1, site="site", device_class="default")
    assert hour == {"hour_ms": START // HOUR_MS * HOUR_MS, "devices": {"offline": 2}}
    assert modes_over_time(live.home, frontier_ms, START, START + 1, site="elsewhere")[0]["devices"] == {}
    assert modes_over_time(live.home, None, START, START + HOUR_MS) == []


def test_the_table_is_replaced_only_after_new_rows(live: _Live) -> None:
    live.keep()
    version = live.version()
    assert live.keep() is None and live.version() == version
    live.batch(signal(3 * HOUR_S, "a"), tick(3 * HOUR_S + 60))
    live.keep()
    assert live.version() == version + 1
    assert len(tables.paths_of(live.home, MODE_HOURLY_SITE)) == 1


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("change", ["replace", "link"])
@pytest.mark.parametrize("table", [MODE_HOURLY_SITE.name, DEVICE_CURRENT.name])
def test_a_killed_maintenance_is_completed_by_the_next_one(
    live: _Live, monkeypatch: pytest.MonkeyPatch, change: str, table: str
) -> None:
    live.keep()
    live.batch(signal(3 * HOUR_S, "a"), signal(3 * HOUR_S + 5, "d"), tick(5 * HOUR_S))
    original = getattr(os, change)

    def killed_at(source: Any, target: Any, **more: Any) -> None:
        if f"/{table}/" in str(target):
            raise _Killed
        original(source, target, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, change, killed_at)
        with pytest.raises(_Killed):
            live.keep()
    assert live.is_kept() is (table == MODE_HOURLY_SITE.name), "both tables have the same versions, or the table is not read"
    assert live.shown() == live.defined()
    live.batch(signal(5 * HOUR_S, "a"), tick(5 * HOUR_S + 60))
    assert live.keep()
    assert live.is_kept() and live.shown() == live.defined()


@pytest.mark.parametrize("content", [b"garbage", None], ids=["garbage", "missing"])
def test_a_damaged_table_is_not_read_and_written_again(live: _Live, content: bytes | None) -> None:
    live.keep()
    [path] = tables.paths_of(live.home, MODE_HOURLY_SITE)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert not live.is_kept() and live.shown() == live.defined()
    assert live.keep() == 3
    assert live.is_kept() and live.shown() == live.defined()


def test_a_damaged_log_of_the_table_is_replaced(live: _Live) -> None:
    live.keep()
    log = DeltaLog(live.home.table(MODE_HOURLY_SITE.name))
    (log.log / f"{log.latest():020d}.json").write_text("{")
    assert not live.is_kept() and live.shown() == live.defined()
    assert live.keep() == 3
    assert live.is_kept()


def test_maintenance_reports_the_number_of_differences(live: _Live) -> None:
    steps = {step.table: step for step in maintain(live.home, KEEP, dry_run=False) if step.did == "keep"}
    with tables.connect() as connection:
        tables.open_table_in(connection, live.home, MODE_HOURLY_SITE)
        [(count,)] = connection.execute(f"SELECT count(*) FROM {MODE_HOURLY_SITE.name}").fetchall()
    assert steps[MODE_HOURLY_SITE.name].rows == count > 0
    assert steps[DEVICE_CURRENT.name].rows == 3
    assert [step for step in maintain(live.home, KEEP, dry_run=False) if step.did == "keep"] == []
