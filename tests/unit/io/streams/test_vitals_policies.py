"""Vitals of the policies in bronze: a record saves the reading of rows that were read before."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fleetpulse.core.policy import parse_policy
from fleetpulse.core.rows import Row
from fleetpulse.core.streams.vitals import Vital, VitalsSpan
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.delta.commits import write_log_checkpoint
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.streams import vitals_policies
from fleetpulse.io.streams.vitals_policies import RECORD, VitalsPolicies
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START, row, tick
from tests.support.histories.streams import land

pytestmark = pytest.mark.unit
LOAD, HEAT = ({name: {"window": "1m"}} for name in ("load", "heat"))


def _policy(received_s: float, vitals: Any) -> Row:
    stored = parse_policy({"vitals": vitals}).normalised()
    return row(received_s, "fleet/_/_/policy", policy=stored, effective_from_s=received_s)


def _span(received_s: int, metric: str) -> VitalsSpan:
    return VitalsSpan(START + received_s * 1000 + 1, {metric: Vital(60_000, 60_000)})


def _files(home: Home, version: int) -> list[Path]:
    return [Path(name) for name, _ in DeltaLog(home.table(MESSAGES.name)).appended(version)]


@pytest.fixture
def bronze(home: Home) -> Home:
    """Bronze of a policy in version 1, and a tick in version 2."""
    tables.create(home, MESSAGES)
    invalid = row(0, "fleet/_/_/policy", policy={"vitals": 1}, effective_from_s=0)
    land(home, [invalid, _policy(1, LOAD), tick(2)], 1)
    land(home, [tick(3)], 2)
    return home


def test_without_a_table_there_are_no_policies(home: Home, tmp_path: Path) -> None:
    policies = VitalsPolicies(home, tmp_path / "c")
    assert policies.spans == () == policies.read_through(3)


def test_policies_of_later_versions_count_from_the_version_that_has_them(bronze: Home, tmp_path: Path) -> None:
    policies = VitalsPolicies(bronze, tmp_path / "c")
    assert policies.spans == (_span(1, "load"),)
    land(bronze, [tick(4)], 3)
    land(bronze, [_policy(5, HEAT)], 4)
    assert policies.read_through(3) == policies.spans
    assert policies.read_through(9) == (_span(1, "load"), _span(5, "heat"))


def test_a_start_reads_only_the_versions_after_the_record(bronze: Home, tmp_path: Path) -> None:
    assert VitalsPolicies(bronze, tmp_path / "c").spans
    land(bronze, [_policy(5, HEAT)], 3)
    for file in (*_files(bronze, 1), *_files(bronze, 2)):
        file.unlink()
    assert VitalsPolicies(bronze, tmp_path / "c").spans == (_span(1, "load"), _span(5, "heat"))


@pytest.mark.parametrize("content", [None, "", "[]", '{"next": 3, "digest": "0"}', '{"next": 9, "digest": null}', "rows"])
def test_all_of_bronze_is_read_without_a_record_of_this_table(bronze: Home, tmp_path: Path, content: str | None) -> None:
    record = tmp_path / "c" / RECORD
    VitalsPolicies(bronze, record.parent)
    found = json.loads(record.read_text())
    if content is None:
        record.unlink()
    else:
        record.write_text(content if content != "rows" else json.dumps(found | {"policies": [1]}))
    assert VitalsPolicies(bronze, record.parent).spans == (_span(1, "load"),)
    assert json.loads(record.read_text()) == found


def test_all_of_bronze_is_read_if_a_version_after_the_record_is_gone(bronze: Home, tmp_path: Path) -> None:
    VitalsPolicies(bronze, tmp_path / "c")
    land(bronze, [tick(4)], 3)
    land(bronze, [_policy(5, HEAT)], 4)
    table = bronze.table(MESSAGES.name)
    write_log_checkpoint(table)
    (table / "_delta_log" / f"{3:020d}.json").unlink()
    assert VitalsPolicies(bronze, tmp_path / "c").spans == (_span(1, "load"), _span(5, "heat"))


def test_only_the_kinds_of_rows_without_a_policy_are_read(bronze: Home, tmp_path: Path) -> None:
    policies = VitalsPolicies(bronze, tmp_path / "c")
    land(bronze, [tick(4)], 3)
    [file] = _files(bronze, 3)
    pq.write_table(pq.read_table(file, columns=["kind"]), file)
    assert policies.read_through(3) == policies.spans


def test_the_record_follows_the_versions_that_were_read(bronze: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals_policies, "RECORD_EVERY", 2)
    policies, found = VitalsPolicies(bronze, tmp_path / "c"), list[int]()
    for version in (3, 4, 5):
        land(bronze, [tick(version)], version)
        policies.read_through(version)
        found.append(json.loads((tmp_path / "c" / RECORD).read_text())["next"])
    assert found == [3, 5, 5]
