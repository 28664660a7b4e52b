"""Facts in memory: refreshed step by step, they equal those of a new load, and the reports."""

from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import QUARANTINE
from fleetpulse.core.times import DAY_MS
from fleetpulse.reports import judgements
from fleetpulse.reports.present import devices, mirror
from fleetpulse.reports.present.kept import keep_present
from fleetpulse.reports.present.mirror import CHANGED, PresentMirror
from fleetpulse.reports.present.tally import COUNTED
from tests.support.floors import Floor
from tests.support.form import examples
from tests.support.histories.histories import START
from tests.support.histories.strategies import DEPLOYMENTS, histories
from tests.support.homes.batches import BatchedHome

CUTS: Final = st.lists(st.integers(0, 60), min_size=2, max_size=4)
EVENTS: Final = ("", "", "", "", "keep", "compact", "load")
REPORTED: Final = ("device_id", "mode", "since", "site", "device_class", "gateway", "transitions", "never_seen")
JUDGED: Final = (*REPORTED, "trigger", "last_seen", "runtime_ms", "reason")
FOLDED, CHANGES = Floor(4), Floor(10)


def _is_judged(row: dict[str, Any]) -> bool:
    """Whether a device is listed without its signals, which a refresh does not read."""
    return row["mode"] != "unjudged" or (row["reason"] or "").startswith("registered from")


def _rows(held: PresentMirror, table: str) -> list[dict[str, Any]]:
    with held.cursor() as cursor:
        result = cursor.execute(f"FROM live.{table}")
        names = [column[0] for column in result.description]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


def _shown(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> list[str]:
    return sorted(repr([row[name] for name in columns]) for row in rows)


def _devices(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> list[str]:
    return _shown([row for row in rows if _is_judged(row)], columns)


class _Watched:
    """A home with a mirror that is refreshed step by step."""

    def __init__(self, landed: BatchedHome) -> None:
        self.landed = landed
        self.held = PresentMirror(landed.home)
        self.now_ms = START

    def refresh(self) -> None:
        self.now_ms += 1
        self.held.refresh(self.now_ms)

    def check(self) -> None:
        """Compare the facts with those of a new load."""
        fresh = PresentMirror(self.landed.home)
        fresh.refresh(self.now_ms)
        mine = _rows(self.held, "devices")
        assert _devices(mine, JUDGED) == _devices(_rows(fresh, "devices"), JUDGED)
        assert _shown(_rows(self.held, "changes"), CHANGED) == _shown(_rows(fresh, "changes"), CHANGED)
        named = ", ".join(f'"{name}"' for name in COUNTED)
        for held in (self.held, fresh):
            cursor, ids = held.searchable()
            with cursor:
                numbers = dict(cursor.execute("SELECT device_id, number FROM live.devices").fetchall())
                assert all(number in ids.find(device_id.lower()) for device_id, number in numbers.items())
                assert len({*numbers.values()}) == len(numbers)
                counted = f"SELECT {named}, sum(n) FROM live.counted GROUP BY ALL HAVING sum(n) != 0"
                expected = f"SELECT {named}, count(*) FROM live.devices GROUP BY ALL"
                assert {*cursor.execute(counted).fetchall()} == {*cursor.execute(expected).fetchall()}
                since_ms = (self.held.reached.frontier_ms or 0) - mirror.CHANGES_MS  # minutes that begin later are complete
                minutes = f"""SELECT minute_ms, from_mode, to_mode, sum(n) FROM live.minutes
                    WHERE minute_ms - 60000 >= {since_ms} GROUP BY ALL"""
                expected = f"""SELECT (event_ms + 59999) // 60000 * 60000 AS minute_ms, from_mode, to_mode, count(*)
                    FROM live.changes WHERE minute_ms - 60000 >= {since_ms} GROUP BY ALL"""
                assert {*cursor.execute(minutes).fetchall()} == {*cursor.execute(expected).fetchall()}
        reached, other = self.held.reached, fresh.reached
        assert (reached.kinds, reached.modes, reached.refused) == (other.kinds, other.modes, other.refused)
        assert (reached.tag, reached.at_ms) == (other.tag, self.now_ms)

    def check_reports(self, changes_ms: int) -> None:
        """Compare the facts with the reports."""
        home, frontier_ms = self.landed.home, self.landed.frontier_ms
        listed = devices.devices(home, frontier_ms)
        assert _devices(_rows(self.held, "devices"), REPORTED) == _devices(listed, REPORTED)
        recent = _rows(self.held, "changes")
        since_ms = (frontier_ms or 0) - changes_ms
        known = [row for row in judgements.transitions(home) if row["event_time"].timestamp() * 1000 >= since_ms]
        names = ("device_id", "event_time", "from_mode", "to_mode", "trigger", "transition_no", "amendment_no")
        assert _shown(recent, names) == _shown(known, names)
        CHANGES.met(len(recent))


@FOLDED.over_all_examples
@CHANGES.over_all_examples
@settings(max_examples=examples(8))
@given(histories(), CUTS, DEPLOYMENTS, st.sampled_from([DAY_MS, 60_000]), st.data())
def test_facts_refreshed_step_by_step_equal_those_of_a_new_load(
    rows: list[Row], drawn_cuts: list[int], deployment: Deployment, changes_ms: int, data: st.DataObject
) -> None:
    cuts = sorted({len(rows), *(1 + cut % len(rows) for cut in drawn_cuts)})
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(mirror, "CHANGES_MS", changes_ms)
        landed = BatchedHome(Path(folder) / "home", rows, deployment)
        watched = _Watched(landed)
        watched.refresh()
        for begin, cut in pairwise([0, *cuts]):
            between = watched.refresh if data.draw(st.booleans()) else lambda: None
            connection = watched.held._connection
            landed.land(cut, amending=data.draw(st.integers(0, 3)) == 0, parts=data.draw(st.integers(1, 2)), between=between)
            if data.draw(st.booleans()):
                refused = {"received_at_ms": rows[cut - 1].received_at_ms, "reason": "not_json"}
                landed.append(QUARANTINE, [refused])
            match data.draw(st.sampled_from(EVENTS)):
                case "keep":
                    keep_present(landed.home, landed.frontier_ms)
                case "compact":
                    landed.compact()
                case "load":
                    watched.now_ms += timedelta(hours=1) // timedelta(milliseconds=1)
            watched.refresh()
            watched.check()
            FOLDED.met(begin > 0 and watched.held._connection is connection)
        watched.check_reports(changes_ms)
