"""Commits concurrent with Spark: one that Spark replaced is repeated, and none is made twice."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta import spark_conflicts
from fleetpulse.io.delta.spark_conflicts import commit_verified
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance.vacuum import remove_rows
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START
from tests.support.refusals import refused

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment())]


def append(home: Home, number: int) -> None:
    entry = {"kind": "add", "device_id": f"d{number}", "amendment_no": number, "event_time_ms": START}
    path, rows = home.table(JUDGEMENTS.name), tables.to_table(JUDGEMENTS, [entry])
    tables.create(home, JUDGEMENTS)

    def write(properties: CommitProperties) -> None:
        write_deltalake(str(path), rows, mode="append", commit_properties=properties)

    commit_verified(path, write, {"amend": number})


def numbers(home: Home) -> list[int]:
    found = tables.query(home, "SELECT amendment_no AS no FROM judgements ORDER BY 1", tables=["judgements"])
    return [one["no"] for one in found]


@contextmanager
def spark(home: Home, times: int, after: Callable[[Path, Path], None]) -> Iterator[None]:
    """Act as Delta's log store: find the next version free, and later rename a file over it."""
    log = home.table(JUDGEMENTS.name) / "_delta_log"

    def rename() -> None:
        for _ in range(times):
            path = log / f"{DeltaTable(str(log.parent)).version() + 1:020d}.json"
            staged = path.with_name(f".{path.name}.0e8b.tmp")
            staged.write_text(json.dumps({"commitInfo": {"engineInfo": "Apache-Spark"}}) + "\n")
            started.set()
            limit_s = time.monotonic() + 20
            while not path.exists() and time.monotonic() < limit_s:
                time.sleep(0.001)
            after(staged, path)

    started = threading.Event()
    other = threading.Thread(target=rename)
    other.start()
    started.wait(20)
    yield
    other.join(60)


def replace_commit(staged: Path, path: Path) -> None:
    time.sleep(0.05)  # Spark has checked the version, and has not renamed its file yet
    staged.replace(path)


def test_replaced_commit_is_repeated_once(home: Home) -> None:
    append(home, 1)
    with spark(home, 1, replace_commit):
        append(home, 2)
    append(home, 3)
    assert numbers(home) == [1, 2, 3]
    assert tables.landed(home, JUDGEMENTS, "amend") == 3


def test_commit_that_was_not_replaced_is_not_repeated(home: Home) -> None:
    def abort(staged: Path, path: Path) -> None:
        time.sleep(0.05)
        staged.unlink()

    with spark(home, 1, abort):
        append(home, 1)
    assert numbers(home) == [1]


def test_wait_for_a_killed_writer_is_bounded(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_conflicts, "_LIMIT_S", 0.1)
    with spark(home, 1, lambda staged, path: None):
        append(home, 1)
    append(home, 2)
    assert numbers(home) == [1, 2]


def test_commit_that_is_replaced_at_every_try_is_refused(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_conflicts, "_TRIES", 1)
    with spark(home, 1, replace_commit), refused("commit-replaced"):
        append(home, 1)
    assert numbers(home) == []


def test_new_table_property_is_set_while_spark_writes_to_the_table(home: Home) -> None:
    path = home.table(JUDGEMENTS.name)
    with spark(home, 1, replace_commit):
        tables.create(home, replace(JUDGEMENTS, properties=(*JUDGEMENTS.properties, ("delta.checkpointInterval", "33"))))
    assert DeltaTable(str(path)).metadata().configuration["delta.checkpointInterval"] == "33"


def test_removed_rows_stay_removed_after_a_replaced_commit(home: Home) -> None:
    for number in (1, 2, 3):
        append(home, number)
    with spark(home, 1, replace_commit):
        assert remove_rows(home.table(JUDGEMENTS.name), "amendment_no < 3") == 2
    assert numbers(home) == [3]
    assert remove_rows(home.table(JUDGEMENTS.name), "amendment_no < 3") == 0
    assert numbers(home) == [3]
