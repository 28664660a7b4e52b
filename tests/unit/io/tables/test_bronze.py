"""Packing of bronze rows into blocks, also from files that another program rewrote."""

from pathlib import Path

import pytest
from deltalake import DeltaTable

from fleetpulse.columnar.codec.arrow import batch_to_rows, from_bytes
from fleetpulse.columnar.codec.wire import from_wire
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.bronze import pack, read_bronze, with_wake_rows
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.homes import landed_home

SIGNALS = [signal(at, f"d{at % 5}", gateway="g" if at % 2 else None, seq=at) for at in range(20)]
OTHERS = [row(30, "d2/death"), tick(31), row(32, "fleet/_/b/gap", op="open", after_s=30, from_s=30)]


def blocks(home: Home) -> set[str]:
    """Return the rows in the blocks of bronze's newest version, as text."""
    found: set[str] = set()
    for file in tables.files_of(home, MESSAGES, "received_at"):
        for block in pack(read_bronze(str(file.path)), 3, START).to_pylist():
            unpacked = from_wire(block["signals"]).to_pylist() if block["signals"] else []
            unpacked += batch_to_rows(from_bytes(block["others"])) if block["others"] else []
            found |= {f"{block['key_group']} {one}" for one in unpacked}
    return found


@pytest.mark.parametrize("rows", [SIGNALS, [*SIGNALS, *OTHERS]], ids=["signals", "of all kinds"])
def test_packing_omits_only_the_device_that_another_program_deleted(rows: list[Row], tmp_path: Path) -> None:
    home = landed_home(tmp_path, rows, Deployment())
    before = blocks(home)
    DeltaTable(str(home.table(MESSAGES.name))).delete("device_id = 'd3'")
    after = blocks(home)
    assert after < before
    assert {one for one in before - after if "'d3'" not in one} == set()
    assert not [one for one in after if "'d3'" in one]


@pytest.mark.parametrize("rows", [SIGNALS[:1], [*SIGNALS[:2], tick(31)]], ids=["one signal", "with a tick"])
def test_a_batch_wakes_every_key_group_once_at_its_newest_row(rows: list[Row], tmp_path: Path) -> None:
    home = landed_home(tmp_path, rows, Deployment())
    [file] = tables.files_of(home, MESSAGES, "received_at")
    packed = pack(read_bronze(str(file.path)), 16, START)
    woken = with_wake_rows(packed, 16)
    assert sorted(woken["key_group"].to_pylist()) == list(range(16))
    assert woken["signals"].to_pylist()[: packed.num_rows] == packed["signals"].to_pylist()
    added = woken.slice(packed.num_rows).to_pylist()
    assert added, "only some key groups have rows"
    newest_ms = max(one.received_at_ms for one in rows)
    assert set(woken["newest_ms"].to_pylist()) == {newest_ms}, "also of key groups that have only older rows"
    assert {(one["signals"], one["others"]) for one in added} == {(None, None)}
    assert {one["received_at"] for one in added} == {max(packed["received_at"].to_pylist())}
