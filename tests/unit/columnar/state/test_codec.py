"""Stored form of a key group: recorded forms read back, and a healthy fleet needs little space.

``.venv/bin/python -m tests.unit.columnar.state.test_codec`` records the current form. Recordings of
older forms do not change.
"""

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from fleetpulse.columnar.codec.arrow import is_signal, signals_to_batch
from fleetpulse.columnar.codec.versions import STORED_FORM, WRITTEN_FORMS
from fleetpulse.columnar.fold.key_group import KeyGroup, begin
from fleetpulse.columnar.fold.pending import pending_to_plain
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.paths import ROOT
from tests.support.histories.histories import (
    GRID_S,
    OWN_AND_REVIEWS,
    any_internal_row,
    any_policy,
    any_signal,
    row,
    signal,
    stamped_by_bridge,
    with_broadcasts,
)
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
GOLDEN = ROOT / "tests" / "golden"
FORMS = sorted(GOLDEN.glob("stored-*.bin"))
DEPLOYMENT = Deployment(60_000, 30_000)
ADDED_FIELDS = {
    **dict.fromkeys(("session", "heard_arrival", "proved_arrival", "clock_offset_ms", "outage_ms", "outage_covered_ms")),
    **dict.fromkeys(("timeout_ms", "death_grace_ms", "firmware", "speaks_from", "spoke_from", "moved_ms", "conflict_ms")),
    "clock": "on_time",
    "excused_ms": 0,
    "velocity_count": 0,
    **dict.fromkeys(("velocity_since_ms", "review_ms", "confirmed_ms")),
}  # fields that forms 5 and 6 add, with their values for a device of an older form


def folded(rows: list[Row], batches: int) -> KeyGroup:
    chunks: dict[int, bytes] = {}
    group = begin(rows[0].received_at_ms)
    edges = [len(rows) * number // batches for number in range(batches + 1)]
    for first, end in pairwise(edges):
        part = with_broadcasts(rows[first:end])
        signals = signals_to_batch(one for one in part if is_signal(one))
        others = [one for one in part if not is_signal(one)]
        step = group.fold(signals, others, part[-1].received_at_ms, DEPLOYMENT, chunks.__getitem__)
        chunks |= dict(step.chunks)
        group.summary(0)
    return group


def plain(group: KeyGroup) -> dict[str, Any]:
    """Return the whole content of a key group as plain JSON values."""
    devices = [group.devices.get(number) for number in range(len(group.devices))]
    values = {
        "devices": [asdict(device) for device in devices if device],
        "listening": asdict(group.shards.listenings[0]),
        "policies": [
            [one.effective_from_ms, one.received_at_ms, one.version, one.policy.normalised()] for one in group.policies.dated
        ],
        "waiting": pending_to_plain(group.waiting),
        "counts": group.counts,
        "due_ms": group.due_ms,
    }
    return json.loads(json.dumps(values))


def upgraded(device: dict[str, Any]) -> dict[str, Any]:
    """Return a device as the newest form stores it: a death of its gateway becomes an outage, unless the device is offline."""
    device = ADDED_FIELDS | device
    if device.pop("gateway_died", False):
        if device["mode"] != "offline":
            device |= {"outage_ms": device["death_ms"], "outage_covered_ms": device["death_covered_ms"]}
        device |= {"death_ms": None, "death_covered_ms": None}
    return device


def _sample() -> KeyGroup:
    random, steps = Random(88), 80
    choose, devices = random.choice, [f"device-{number}" for number in range(80)]
    rows = [any_signal(choose, devices, steps) for _ in range(1_000)]
    rows += {
        one.received_at_ms: one for one in (any_internal_row(choose, devices, steps, OWN_AND_REVIEWS) for _ in range(150))
    }.values()
    rows += [row(150 + 2.5 * number + 0.0005, f"device-{number}/control", op="confirm") for number in range(80)]
    end = steps * GRID_S
    rows += [
        row(end + 0.001, "fleet/_/_/policy", policy=any_policy(choose, reviews=True), effective_from_s=end + 90),
        row(end + 0.002, "fleet/_/b/gap", op="close", until_s=end),
        row(end + 1, "fleet/_/b/gap", op="open", from_s=end - 7),
        row(end + 4, "fleet/_/b/gap", op="close", until_s=end + 4),
        row(end + 5, "device-0/control", op="maintain", until_s=end + 80),
        signal(end + 25, "device-1", received_s=end + 6),
    ]
    return folded(stamped_by_bridge(rows), 9)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_recorded_form_reads_back_unchanged(form: Path) -> None:
    group = KeyGroup.from_bytes(form.read_bytes())
    recorded = json.loads(form.with_suffix(".json").read_text())
    recorded["devices"] = [upgraded(device) for device in recorded["devices"]]
    assert plain(group) == recorded
    for written in WRITTEN_FORMS:
        assert plain(KeyGroup.from_bytes(group.to_bytes(written))) == recorded


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_recorded_form_covers_all_content_of_a_key_group(form: Path) -> None:
    recorded = json.loads(form.with_suffix(".json").read_text())
    devices = recorded["devices"]
    assert {device["mode"] for device in devices} >= {"online", "offline", "degraded", "flagged", "maintenance", "decommissioned"}
    for name, value in devices[0].items():
        assert len({json.dumps(device[name]) for device in devices}) > 1, f"{name} is {value} in all devices"
    assert recorded["listening"]["coverage"]["gaps"]
    assert len(recorded["policies"]) > 1
    assert len(recorded["waiting"]["chunks"]) > 1
    assert recorded["counts"] and recorded["due_ms"]


def test_the_current_stored_form_is_recorded() -> None:
    assert GOLDEN / f"stored-{STORED_FORM}.bin" in FORMS


@pytest.mark.parametrize("version", [1, STORED_FORM + 1])
def test_a_form_of_an_unsupported_version_is_refused(version: int) -> None:
    current = f'"version":{STORED_FORM},'.encode()
    stored = (GOLDEN / f"stored-{STORED_FORM}.bin").read_bytes()
    assert stored.count(current) == 1
    with refused(
        "state-version-unsupported",
        match=f"format version {version}: .* 4 to {STORED_FORM}",
    ):
        KeyGroup.from_bytes(stored.replace(current, f'"version":{version},'.encode()))


def test_a_truncated_form_is_not_read() -> None:
    stored = (GOLDEN / f"stored-{STORED_FORM}.bin").read_bytes()
    for end in (len(stored) // 3, len(stored) - 200):
        with pytest.raises((pa.ArrowInvalid, OSError)):
            KeyGroup.from_bytes(stored[:end])


def test_a_healthy_fleet_needs_few_bytes_per_device() -> None:
    random, devices = Random(3), 8_000
    starts = [random.random() * 60 for _ in range(devices)]
    boots = [f"b{random.randrange(1, 30)}" for _ in range(devices)]
    rows = [
        signal(
            start + 60 * beat,
            f"meter-{number:07d}",
            received_s=start + 60 * beat + random.random(),
            seq=random.randrange(10_000) * 10 + beat,
            boot=boots[number],
            gateway=f"gateway-{number % 7}",
        )
        for beat in range(4)
        for number, start in enumerate(starts)
    ]
    group = folded(sorted(rows, key=lambda one: one.received_at_ms), 4)
    assert group.devices.by_mode() == {"online": devices}
    assert len(group.to_bytes()) <= 64 * devices


if __name__ == "__main__":
    at = GOLDEN / f"stored-{STORED_FORM}.bin"
    sample = _sample()
    at.write_bytes(sample.to_bytes())
    at.with_suffix(".json").write_text(json.dumps(plain(sample), sort_keys=True) + "\n")
