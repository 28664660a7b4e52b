"""Upgrade of a home of version 1: its state is migrated, and its judgements stay.

Later messages are judged by version 2.

``tests/golden/home-1.tar.gz`` is the home of twelve simulated devices, recorded for 100 minutes and judged by version 1 (commit
716d995), without its broker, logs and Spark folders.
"""

import tarfile
from pathlib import Path

import pytest

from fleetpulse.core.lifecycle import Mode
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.home import Home
from fleetpulse.paths import ROOT
from tests.support.fleet_command import fleet, rows_of
from tests.support.histories.histories import signal, tick
from tests.support.histories.recordings import record_rows

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1200)]
RECORDED = ROOT / "tests" / "golden" / "home-1.tar.gz"
LATER_S = 3 * 3_600


def test_a_home_of_version_1_is_migrated_and_judges_new_messages(tmp_path: Path) -> None:
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    path = tmp_path / "home"
    home, options = Home(path), ("--json", "--home", str(path))
    before, devices = rows_of("transitions", *options), {one["device_id"]: one for one in rows_of("devices", *options)}
    assert (home.generation().form, len(devices)) == (4, 12)
    ahead = next(one for one, known in devices.items() if known["mode"] == "offline" and "ahead" in (known["clock"] or ""))
    reached = judged_up_to(home.checkpoint)

    done = fleet("state", "migrate", "--home", str(path))
    assert done.returncode == 0, done.stderr
    assert home.generation().form == 6
    assert home.judged_by_version_1_ms() == (reached or (0, 0))[1], "judgements of version 1 do not follow from bronze"
    assert rows_of("transitions", *options) == before

    beats = [signal(LATER_S + 60 * number + ahead_s, device, received_s=LATER_S + 60 * number)
             for number in range(5) for device, ahead_s in ((ahead, 1_200), ("new", 0))]  # fmt: skip
    later = record_rows(tmp_path / "later.ndjson.gz", [*beats, tick(LATER_S + 400)])
    done = fleet("replay", str(later), "--home", str(path))
    assert done.returncode == 0, done.stderr
    after = rows_of("transitions", *options)
    assert [one for one in after if one in before] == before, "earlier judgements stay"
    modes = {one["device_id"]: one["mode"] for one in rows_of("devices", *options)}
    assert (modes[ahead], modes["new"]) == (Mode.ONLINE, Mode.ONLINE), "a clock that is ahead takes no device offline"
    assert {one["device_id"] for one in after if one not in before} >= {ahead, "new"}

    checked = fleet("quality", "run", "--home", str(path))
    assert checked.returncode == 0, checked.stderr
