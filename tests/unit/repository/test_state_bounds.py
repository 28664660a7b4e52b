"""Bounds of stored fields: docs/concepts/state-store.md lists each field with its bound."""

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from fleetpulse.columnar.codec.arrow import SIGNAL_SCHEMA
from fleetpulse.columnar.fold.key_group import KeyGroup, begin
from fleetpulse.columnar.fold.pending import Chunk, PendingRows
from fleetpulse.columnar.jit.layout import DEVICE_FIELDS, MEMORY_WIDTH, ROW_FIELDS
from fleetpulse.columnar.snapshot.rows import head_of
from fleetpulse.columnar.state.deltas import WORDS
from fleetpulse.columnar.state.devices import REVIEWS, Devices
from fleetpulse.core.device import Device
from fleetpulse.core.policy import MAX_ERRORS, MAX_SEQUENCE, Dated, Policies, Policy, Rules
from fleetpulse.core.presence.coverage import Coverage, ShardProgress
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.rows import Row
from fleetpulse.io.ingest.segments import BridgePosition
from fleetpulse.io.lifecycle.state_reader import VARIABLES
from fleetpulse.paths import ROOT

pytestmark = pytest.mark.unit
STORED = (
    Device,
    Devices,
    KeyGroup,
    PendingRows,
    Chunk,
    Row,
    Shards,
    ShardProgress,
    Coverage,
    Policies,
    Dated,
    Policy,
    Rules,
    BridgePosition,
)
OF_SPARK = "state variable"
_CODE = re.compile(r"`([^`]+)`")
_NUMBER = re.compile(r"`([A-Z_]+)` = ([\d,]+)")


@dataclass(frozen=True)
class Bound:
    """A row of the table."""

    of: str
    names: tuple[str, ...]
    bound: str
    where: str

    def places(self) -> Iterable[tuple[Path, tuple[str, ...]]]:
        """Yield each named file with the names that it must contain."""
        for place in self.where.split(";"):
            file, *names = _CODE.findall(place)
            yield ROOT / file if file.startswith("streaming/") else ROOT / "fleetpulse" / file, tuple(names)


def _table() -> list[Bound]:
    section = (
        (ROOT / "docs/concepts/state-store.md").read_text().split("## What is kept, and what bounds it")[1].split("\n## ")[0]
    )
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("| ")]
    return [Bound(of.strip("`"), tuple(_CODE.findall(names)), bound, where) for of, names, bound, where in lines[2:]]


def _listed(of: str) -> set[str]:
    return {name for one in _table() if one.of == of for name in one.names}


@pytest.mark.parametrize("stored", STORED, ids=lambda stored: stored.__name__)
def test_every_stored_field_is_listed_with_its_bound(stored: type) -> None:
    clock_columns = {"device_clock", "offset_ms"} if stored is Row else set()  # columns that encode the clock of a signal
    assert _listed(stored.__name__) == {one.name for one in fields(stored)} | clock_columns  # pyright: ignore[reportArgumentType]
    assert all(one.bound and one.where for one in _table())


def test_every_part_of_the_state_is_listed() -> None:
    assert {one.of for one in _table()} == {OF_SPARK, *(one.__name__ for one in STORED)}
    assert _listed(OF_SPARK) == set(VARIABLES)
    in_memory = {"device_id", "error_times_ms", "codes", "progress", "progress_of", *REVIEWS}
    assert {one.name for one in fields(Device)} - in_memory == set(DEVICE_FIELDS) - {"memory"}
    assert 2 * (MAX_ERRORS + 1) + MAX_SEQUENCE + 1 + len(REVIEWS) == MEMORY_WIDTH
    derived = {"device", "arrival", "direct"}  # from other fields
    assert {*SIGNAL_SCHEMA.names, *ROW_FIELDS} - derived <= _listed("Row")
    # Not listed, but their contents are.
    containers = {"shards", "listenings", "sites", "coverage", "policies", "devices", "dated"}
    block_names = {name for of in ("KeyGroup", "ShardProgress", "Coverage") for name in _listed(of)} - containers
    device_names = {"version", "count", "base", *WORDS}  # parts of the stored form, see `Devices`
    assert set(head_of(begin(0).to_bytes())) - device_names == block_names | {"policies"}


@pytest.mark.parametrize("bound", _table(), ids=lambda bound: f"{bound.of}-{bound.names[0]}")
def test_each_bound_is_in_the_code_that_the_table_names(bound: Bound) -> None:
    modules = []
    for file, names in bound.places():
        text = file.read_text()
        assert names and [name for name in names if not re.search(rf"\b{name}\b", text)] == [], file
        modules.append(importlib.import_module(str(file.relative_to(ROOT).with_suffix("")).replace("/", ".")))
    assert modules
    for name, number in _NUMBER.findall(bound.bound):
        assert {getattr(module, name) for module in modules if hasattr(module, name)} == {int(number.replace(",", ""))}, name
