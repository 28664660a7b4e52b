"""Soak test: under a constant load the state does not grow, while devices join and leave."""

from pathlib import Path
from statistics import median

import pytest
from rich.console import Console

from bench.load import Load
from bench.soak import SETTLED, Plan, run
from cli.dev.jvm_lease import LEASES_JVMS
from fleetpulse.io.home.home import KEY_GROUPS

pytestmark = [pytest.mark.spark, pytest.mark.extended]


def test_the_state_does_not_grow_under_a_constant_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEASES_JVMS, raising=False)  # the memory of the job includes that of its JVM
    load = Load(devices=400, leaving=4, step_ms=30_000)
    found = run(Plan(load, minutes=0.3, period_s=0.5, batches=16, maintain_s=4, judged=SETTLED), Console(stderr=True), tmp_path)
    assert {one.bound.series for one in found.trends() if one.grows} & {*SETTLED} == set()
    assert found.maintained, "maintenance runs beside the job"
    assert max(found.series["state_rows"][-6:]) <= 8 * KEY_GROUPS
    assert max(found.series["state_bytes"]) < 1_000 * load.devices
    assert load.devices <= median(found.series["devices"][-6:]) <= 1.2 * load.devices
    third = len(memory := found.series["rss_bytes"]) // 3
    assert median(memory[-third:]) < 1.5 * median(memory[third : 2 * third]), (
        "no batch leaks memory; a soak of an hour finds slower leaks"
    )
    assert not list(tmp_path.iterdir())
