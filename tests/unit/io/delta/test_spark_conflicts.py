"""A commit from outside of Spark that Spark's replaces is made again; none is made twice."""

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
    """Do as Delta's log store does: find the next version free, and rename to it when another has it."""
    log = home.table(JUDGEMENTS.name) / "_delta_log"

    def rename() -> None:
        for _ in range(times):
            path = log / f"{DeltaTable(str(log.parent)).version() + 1:020d}.json"
            aside = path.with_name(f".{path.name}.0e8b.tmp")
            aside.write_text(json.dumps({"commitInfo": {"engineInfo": "Apache-Spark"}}) + "\n")
            begun.set()
            limit_s = time.monotonic() + 20
            while not path.exists() and time.monotonic() < limit_s:
                time.sleep(0.001)
            after(aside, path)

    begun = threading.Event()
    other = threading.Thread(target=rename)
    other.start()
    begun.wait(20)
    yield
    other.join(60)


def replace_it(aside: Path, path: Path) -> None:
    time.sleep(0.05)  # it has looked, and is not there yet
    aside.replace(path)


def test_a_commit_that_was_replaced_is_made_again_once(home: Home) -> None:
    append(home, 1)
    with spark(home, 1, replace_it):
        append(home, 2)
    append(home, 3)
    assert numbers(home) == [1, 2, 3]
    assert tables.landed(home, JUDGEMENTS, "amend") == 3


def test_a_commit_that_was_not_replaced_is_not_made_again(home: Home) -> None:
    def give_up(aside: Path, path: Path) -> None:
        time.sleep(0.05)
        aside.unlink()

    with spark(home, 1, give_up):
        append(home, 1)
    assert numbers(home) == [1]


def test_a_writer_that_was_killed_is_not_waited_for_for_ever(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_conflicts, "_LIMIT_S", 0.1)
    with spark(home, 1, lambda aside, path: None):
        append(home, 1)
    append(home, 2)
    assert numbers(home) == [1, 2]


def test_who_is_always_replaced_is_told(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_conflicts, "_TRIES", 1)
    with spark(home, 1, replace_it), refused("commit-replaced"):
        append(home, 1)
    assert numbers(home) == []


def test_a_property_that_was_declared_since_is_set_beside_a_running_job(home: Home) -> None:
    path = home.table(JUDGEMENTS.name)
    with spark(home, 1, replace_it):
        tables.create(home, replace(JUDGEMENTS, properties=(*JUDGEMENTS.properties, ("delta.checkpointInterval", "33"))))
    assert DeltaTable(str(path)).metadata().configuration["delta.checkpointInterval"] == "33"


def test_rows_that_are_removed_stay_removed(home: Home) -> None:
    for number in (1, 2, 3):
        append(home, number)
    with spark(home, 1, replace_it):
        assert remove_rows(home.table(JUDGEMENTS.name), "amendment_no < 3") == 2
    assert numbers(home) == [3]
    assert remove_rows(home.table(JUDGEMENTS.name), "amendment_no < 3") == 0
    assert numbers(home) == [3]
