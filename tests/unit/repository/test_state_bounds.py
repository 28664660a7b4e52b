"""Every field that is kept has a bound: the table in docs/concepts/state-store.md names each, and says what the code says."""

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
from fleetpulse.columnar.state.devices import Devices
from fleetpulse.core.device import Device
from fleetpulse.core.policy import MAX_ERRORS, MAX_SEQUENCE, Dated, Policies, Policy, Rules
from fleetpulse.core.presence.coverage import Coverage, ShardProgress
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.rows import Row
from fleetpulse.io.ingest.segments import BridgePosition
from fleetpulse.io.lifecycle.state_reader import VARIABLES
from fleetpulse.paths import ROOT

pytestmark = pytest.mark.unit
KEPT = (
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
_WORD = re.compile(r"`([^`]+)`")
_NUMBER = re.compile(r"`([A-Z_]+)` = ([\d,]+)")


@dataclass(frozen=True)
class Bound:
    """A line of the table."""

    of: str
    names: tuple[str, ...]
    bound: str
    where: str

    def places(self) -> Iterable[tuple[Path, tuple[str, ...]]]:
        """Return the files that are named, each with the names in it."""
        for place in self.where.split(";"):
            file, *names = _WORD.findall(place)
            yield ROOT / file if file.startswith("streaming/") else ROOT / "fleetpulse" / file, tuple(names)


def _table() -> list[Bound]:
    section = (
        (ROOT / "docs/concepts/state-store.md").read_text().split("## What is kept, and what bounds it")[1].split("\n## ")[0]
    )
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("| ")]
    return [Bound(of.strip("`"), tuple(_WORD.findall(names)), bound, where) for of, names, bound, where in lines[2:]]


def _listed(of: str) -> set[str]:
    return {name for one in _table() if one.of == of for name in one.names}


@pytest.mark.parametrize("kept", KEPT, ids=lambda one: one.__name__)
def test_every_field_that_is_kept_is_listed_with_its_bound(kept: type) -> None:
    more = {"device_clock", "offset_ms"} if kept is Row else set()  # how the columns of a signal have its clock
    assert _listed(kept.__name__) == {one.name for one in fields(kept)} | more  # pyright: ignore[reportArgumentType]
    assert all(one.bound and one.where for one in _table())


def test_all_that_is_kept_is_of_something_that_is_listed() -> None:
    assert {one.of for one in _table()} == {OF_SPARK, *(one.__name__ for one in KEPT)}
    assert _listed(OF_SPARK) == set(VARIABLES)
    in_memory = {"device_id", "error_times_ms", "codes", "progress", "progress_of"}
    assert {one.name for one in fields(Device)} - in_memory == set(DEVICE_FIELDS) - {"memory"}
    assert MEMORY_WIDTH == 2 * (MAX_ERRORS + 1) + MAX_SEQUENCE + 1
    assert {*SIGNAL_SCHEMA.names, *ROW_FIELDS} - {"device", "arrival", "direct"} <= _listed("Row")  # those follow from others
    its = {"shards", "listenings", "sites", "coverage", "policies", "devices", "dated"}  # these are told by what is in them
    of_a_block = {name for of in ("KeyGroup", "Listening", "Coverage") for name in _listed(of)} - its
    of_devices = {"version", "count", "base", *WORDS}  # the stored form's, see `Devices`
    assert set(head_of(begin(0).to_bytes())) - of_devices == of_a_block | {"policies"}


@pytest.mark.parametrize("one", _table(), ids=lambda one: f"{one.of}-{one.names[0]}")
def test_what_bounds_a_field_is_where_the_table_says(one: Bound) -> None:
    modules = []
    for file, names in one.places():
        text = file.read_text()
        assert names and [name for name in names if name not in text] == [], file
        modules.append(importlib.import_module(str(file.relative_to(ROOT).with_suffix("")).replace("/", ".")))
    assert modules
    for name, number in _NUMBER.findall(one.bound):
        assert {getattr(module, name) for module in modules if hasattr(module, name)} == {int(number.replace(",", ""))}, name
