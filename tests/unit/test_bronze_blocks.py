"""Bronze packed into blocks, also where somebody else has rewritten its files."""

from pathlib import Path

import pytest
from deltalake import DeltaTable

from fleetpulse.columnar.blocks import batch_to_rows, from_bytes
from fleetpulse.columnar.wire import from_wire
from fleetpulse.core.messages import Row
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io import delta
from fleetpulse.io.bronze_blocks import pack, read_bronze
from fleetpulse.io.home import Home
from tests.histories import START, row, signal, tick
from tests.homes import landed_home

SIGNALS = [signal(at, f"d{at % 5}", gateway="g" if at % 2 else None, seq=at) for at in range(20)]
OTHERS = [row(30, "d2/death"), tick(31), row(32, "fleet/_/b/gap", op="open", after_s=30, from_s=30)]


def blocks(home: Home) -> set[str]:
    """Return what stands in the blocks of bronze's newest version, as text."""
    found: set[str] = set()
    for file in delta.files_of(home, MESSAGES, "received_at"):
        for block in pack(read_bronze(str(file.path)), 3, START).to_pylist():
            told = from_wire(block["signals"]).to_pylist() if block["signals"] else []
            told += batch_to_rows(from_bytes(block["others"])) if block["others"] else []
            found |= {f"{block['key_group']} {one}" for one in told}
    return found


@pytest.mark.parametrize("rows", [SIGNALS, [*SIGNALS, *OTHERS]], ids=["signals", "of all kinds"])
def test_a_device_that_was_deleted_by_another_program_is_gone_and_the_others_are_packed(rows: list[Row], tmp_path: Path) -> None:
    home = landed_home(tmp_path, rows, Deployment())
    before = blocks(home)
    DeltaTable(str(home.table(MESSAGES.name))).delete("device_id = 'd3'")
    after = blocks(home)
    assert after < before
    assert {one for one in before - after if "'d3'" not in one} == set()
    assert not [one for one in after if "'d3'" in one]
