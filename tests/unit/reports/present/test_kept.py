"""Kept facts of a home: written by maintenance, read with newer rows, and equal to those of all rows."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import DEVICE_CURRENT, JUDGEMENTS, MESSAGES, Table
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports import frontiers
from fleetpulse.reports.present import devices, kept
from fleetpulse.reports.present.kept import Position, Present, keep_present, open_present
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.homes import RegisteredHome, empty

pytestmark = pytest.mark.unit
RULES: dict[str, Any] = {"rules": {"timeout": "100s", "forget_after": "500s"}}
IN_FORCE = row(0, "fleet/_/_/policy", policy=parse_policy(RULES).normalised(), effective_from_s=-1000)


def _add(received_s: float, device: str, **content: Any) -> Row:
    return row(received_s, f"fleet/site/{device}/registry", op="add", **content)


class _Live(RegisteredHome):
    """A judged home whose facts can be kept between batches."""

    def __init__(self, path: Path) -> None:
        super().__init__(path / "home", Deployment(10_000, max_clock_lead_ms=100_000))

    def keep(self) -> int | None:
        return keep_present(self.home, frontiers.judged_frontier_ms(self.home))

    def facts(self) -> tuple[Any, ...]:
        """Return what `fleet status`, `fleet devices` and `fleet device` read."""
        frontier_ms = frontiers.judged_frontier_ms(self.home)
        return (
            devices.counts(self.home, frontier_ms),
            devices.devices(self.home, frontier_ms),
            devices.newest_devices(self.home, frontier_ms, "online", 1),
            devices.devices(self.home, frontier_ms, device_id="b"),
        )

    def is_kept(self) -> bool:
        with open_present(self.home, frontiers.judged_frontier_ms(self.home)) as present:
            return present.position is not None

    def without_kept(self) -> tuple[Any, ...]:
        """Return the same as `facts`, read from all rows."""
        folder = self.home.table(DEVICE_CURRENT.name)
        aside = folder.with_name("aside")
        folder.rename(aside)
        try:
            assert not self.is_kept()
            return self.facts()
        finally:
            aside.rename(folder)


@pytest.fixture
def live(tmp_path: Path) -> _Live:
    made = _Live(tmp_path)
    made.batch(IN_FORCE, _add(5, "d"), signal(10, "a"), signal(20, "b"), signal(25, "c"), tick(40))
    return made


def test_newer_rows_are_folded_into_the_kept_facts(live: _Live) -> None:
    assert live.keep() == 4
    assert live.is_kept()
    beats = [signal(at, "b") for at in range(60, 400, 50)]
    live.batch(
        *beats, signal(300, "new"), signal(310, "late", received_s=395), _add(320, "later", effective_from_s=9_000), tick(400)
    )
    assert live.facts() == live.without_kept()
    assert live.facts()[0]["devices"] == {"offline": 3, "online": 2}
    assert live.keep() == 7
    live.batch(signal(450, "a"), signal(395, "b", received_s=460), _add(470, "d", gateway="gate"), tick(500))
    live.batch(tick(900), signal(905, "a"), tick(910))
    assert live.facts() == live.without_kept()


def test_facts_are_written_only_after_new_rows(live: _Live) -> None:
    assert live.keep() == 4
    version = tables.version(live.home.table(DEVICE_CURRENT.name))
    assert live.keep() is None
    live.batch(tick(45), tick(46))
    assert live.keep() == 4
    assert tables.version(live.home.table(DEVICE_CURRENT.name)) == version + 1
    assert len(tables.paths_of(live.home, DEVICE_CURRENT)) == 1


def test_signals_of_the_newest_millisecond_are_folded_once(live: _Live) -> None:
    live.batch(signal(50, "a"))
    live.keep()
    live.batch(signal(50, "b"), signal(50.001, "a"), tick(60))
    assert live.facts() == live.without_kept()


def test_facts_are_read_from_all_rows_if_the_log_lacks_a_newer_version(live: _Live) -> None:
    live.keep()
    live.batch(signal(60, "a"), signal(250, "b"), tick(300))
    live.batch(signal(420, "a"), tick(450))
    wanted = live.facts()
    log = DeltaLog(live.home.table(JUDGEMENTS.name))
    tables.open_table(log.table).create_checkpoint()
    (log.log / f"{log.latest() - 1:020d}.json").unlink()
    assert not live.is_kept()
    assert live.facts() == wanted


@pytest.mark.parametrize("table", [JUDGEMENTS, MESSAGES], ids=lambda table: table.name)
def test_facts_are_read_from_all_rows_after_a_restore_of_another_table(live: _Live, tmp_path: Path, table: Table) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(live.home.table(table.name), backup)
    live.batch(signal(60, "a"), signal(250, "b"), tick(300))
    live.keep()
    assert live.is_kept()
    shutil.rmtree(live.home.table(table.name))
    shutil.copytree(backup, live.home.table(table.name))
    assert not live.is_kept(), "the version is missing"
    other = tables.to_table(table, [{"kind": "late", "device_id": "z", "received_at_ms": START}])
    tables.append(live.home, table, other, "other", 1)
    assert not live.is_kept(), "the version has other rows"


def test_a_wrong_clock_that_is_not_judged_yet_is_counted_like_from_all_rows(live: _Live) -> None:
    live.batch(signal(1_000, "a", received_s=50), signal(60, "a"), tick(80))
    live.keep()
    live.batch(signal(2_000, "a", received_s=85), tick(86))
    assert live.facts() == live.without_kept()
    assert live.facts()[0]["clocks"] == {"ahead": 1}


def test_facts_are_read_from_all_rows_after_a_change_of_their_settings(live: _Live) -> None:
    live.keep()
    record = live.home.path / "home.json"
    content = json.loads(record.read_text())
    changed = {**content, "deployment": {**content["deployment"], "max_backlog_ms": 1_000}} if "deployment" in content else None
    assert changed is not None, sorted(content)
    record.write_text(json.dumps(changed))
    assert not live.is_kept()


def test_a_table_of_another_form_is_not_read(live: _Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.keep()
    assert live.is_kept()
    monkeypatch.setattr(kept, "FORM", kept.FORM + 1)
    assert not live.is_kept()


def test_nothing_is_written_before_the_first_row(tmp_path: Path) -> None:
    home = empty(tmp_path / "home", Deployment())
    assert keep_present(home, None) is None
    shutil.rmtree(home.table(DEVICE_CURRENT.name))
    assert keep_present(home, None) is None


def test_dry_run_counts_the_devices_and_writes_nothing(live: _Live) -> None:
    frontier_ms = frontiers.judged_frontier_ms(live.home)
    assert frontier_ms is not None and frontier_ms > START
    assert keep_present(live.home, frontier_ms, dry_run=True) == 4
    assert not live.is_kept()


@pytest.mark.parametrize("content", [b"", b"garbage", None], ids=["empty", "garbage", "missing"])
def test_a_damaged_table_is_read_from_all_rows_and_written_again(live: _Live, content: bytes | None) -> None:
    live.keep()
    [path] = tables.paths_of(live.home, DEVICE_CURRENT)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert not live.is_kept()
    assert live.keep() == 4
    assert live.is_kept()


def test_a_damaged_log_of_the_table_is_replaced(live: _Live) -> None:
    live.keep()
    log = DeltaLog(live.home.table(DEVICE_CURRENT.name))
    (log.log / f"{log.latest():020d}.json").write_text("{")
    assert not live.is_kept()
    assert live.keep() == 4
    assert live.is_kept()


def test_a_position_with_other_fields_is_not_read() -> None:
    for text in ("", "[]", "{}", json.dumps({"form": kept.FORM, "versions": {}})):
        assert kept._position(text) is None


def test_the_memory_of_writing_is_bounded_and_further_rows_are_spilled(live: _Live, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled = live.home.table(DEVICE_CURRENT.name).with_name(".device_current.sort")
    spilled.mkdir()
    (spilled / "of a killed process").touch()
    monkeypatch.setattr(tables, "SPILLING_MEMORY", "64MiB")
    seen, write = list[object](), kept._write

    def observed(home: Home, present: Present, position: Position) -> int | None:
        asked = "SELECT current_setting('memory_limit'), current_setting('temp_directory')"
        seen.extend(present.connection.execute(asked).fetchall())
        assert not spilled.exists()
        return write(home, present, position)

    monkeypatch.setattr(kept, "_write", observed)
    assert live.keep() == 4
    assert seen == [("64.0 MiB", str(spilled))]
