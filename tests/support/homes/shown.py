"""Home with a small fleet for the operations page: sites, classes, every mode that it shows, a gap, hostile ids.

The definition judges it, without a JVM.
"""

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Kind, Row
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.tables import COVERAGE, DEVICES
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START, positioned, registry_entries, row
from tests.support.homes.homes import JudgedHome, empty

SITES: Final = {"harbour": 34, "north-field": 28, "depot-7": 22, "mill": 16, "quarry": 9}  # devices of each
CLASSES: Final = ("pump", "sensor", "camera")
HOSTILE: Final = (
    "<script>alert(1)</script>", '" hx-get="/x', "..%2f", "..", ".", "-", "a/why", "a?b=c&d#e", "\u202eevitcart\u202c", "ж" * 64,
    "{{ 7 * 7 }}",
)  # fmt: skip
_RULES: Final = {
    "timeout": "50m", "death_grace": "20s", "degraded": {"errors": 3, "window": "4h"},
    "flagged": {"codes": ["reconnaissance", "auth_failed"], "window": "1h", "hold": "20h"},
}  # fmt: skip
_DAY_S: Final = 86_400
_GAP: Final = (7.5, 6.75)  # hours before the end in which the bridge was not listening


def shown_home(path: Path, end_ms: int = START + 30 * _DAY_S * 1000, hours: float = 27) -> Home:
    """Create the home.

    Args:
        path: folder of the home.
        end_ms: instant of the newest row, epoch milliseconds.
        hours: hours of messages before it.
    """
    judged = JudgedHome(empty(path, Deployment(60_000)))
    rows = positioned(sorted(_rows((end_ms - START) / 1000, hours), key=lambda one: one.received_at_ms))
    judged.land_and_judge(*rows)
    tables.append(judged.home, DEVICES, tables.to_table(DEVICES, registry_entries(rows)), "test", 1)
    spans = [{"received_at_ms": one.received_at_ms, **one.contents()} for one in rows if one.kind is Kind.GAP]
    gaps = [{**one, "at_ms": one.get("from", one.get("until")), "why": "broker", "bridge": "bridge-1"} for one in spans]
    tables.append(judged.home, COVERAGE, tables.to_table(COVERAGE, gaps), "test", 1)
    return judged.home


def seem_running(home: Home, *streams: StreamName) -> None:
    """Write a status of the lifecycle job and of streams beside it that stays new for an hour."""
    path = home.run("lifecycle")
    path.parent.mkdir(exist_ok=True)
    running = {"state": "running", "batch": 1, "failures": 0, "error": None}
    path.write_text(json.dumps({"state": "running", "streams": {one.value: running for one in streams}}))
    at_s = time.time() + 3_600
    os.utime(path, (at_s, at_s))


def _rows(end_s: float, hours: float) -> Iterator[Row]:
    chance = random.Random(7)
    begin_s = end_s - hours * 3_600
    policy = parse_policy({"rules": _RULES, "classes": {"camera": {"timeout": "1h30m"}}}).normalised()
    yield row(begin_s, "fleet/_/_/policy", policy=policy, effective_from_s=begin_s - 10)
    for at_s, gap in zip(_GAP, ({"op": "open"}, {"op": "close"}), strict=True):
        named = {"from_s" if gap["op"] == "open" else "until_s": end_s - at_s * 3_600}
        yield row(end_s - _GAP[1] * 3_600 + (0.001 if gap["op"] == "close" else 0), "fleet/_/bridge-1/gap", **gap, **named)
    for site, count in SITES.items():
        for number in range(count):
            yield from _device(chance, site, number, begin_s, end_s)
    yield row(end_s - 3_000, "fleet/harbour/gw-harbour-1/death", ts_s=end_s - 3_000, gateway="gw-harbour-1")
    yield row(begin_s + 2, "fleet/mill/pump-9001/registry", op="add", **{"class": "pump"})
    for number, device_id in enumerate(HOSTILE):
        yield replace(row(end_s - 900 + number, "fleet/mill/x/heartbeat", ts_s=end_s - 900 + number), device_id=device_id)
    yield row(end_s, "fleet/_/bridge-1/tick")


def _device(chance: random.Random, site: str, number: int, begin_s: float, end_s: float) -> Iterator[Row]:
    """Yield the rows of one device; its number decides its fate."""
    kind = CLASSES[number % 3]
    name = f"fleet/{site}/{kind}-{1000 * (list(SITES).index(site) + 1) + number}"
    behind = {"gateway": f"gw-{site}-{1 + number % 2}"} if site in ("harbour", "mill") else {}
    yield row(begin_s + 1, f"{name}/registry", op="add", **{"class": kind}, **behind)
    silent_from_s = end_s - chance.uniform(0.3, 25) * 3_600 if number % 9 == 4 else end_s
    silent_until_s = silent_from_s + chance.uniform(1, 5) * 3_600 if number % 2 else end_s + 1
    cut = behind.get("gateway") == "gw-harbour-1" and number % 5 != 0
    if cut:
        silent_from_s, silent_until_s = end_s - 3_000, end_s + 1
    at_s = begin_s + chance.uniform(5, 1_200)
    while at_s < end_s:
        deaf = end_s - _GAP[0] * 3_600 <= at_s <= end_s - _GAP[1] * 3_600
        if not deaf and not silent_from_s <= at_s < silent_until_s:
            yield row(at_s, f"{name}/heartbeat", ts_s=at_s, **behind)
        at_s += chance.uniform(900, 1_500)
    errors = {11: ("overheat",) * 4, 17: ("reconnaissance", "auth_failed")}.get(number, ())
    for place, code in enumerate(errors):
        yield row(end_s - 3_000 + 60 * place, f"{name}/error", ts_s=end_s - 3_000 + 60 * place, code=code, **behind)
    if number == 8:
        yield row(end_s - 5_000, f"{name}/control", op="maintain", until_s=end_s + 7_200)
    if number == 14:
        yield row(end_s - 1_800, f"{name}/control", op="update", until_s=end_s + 3_600)
    if number == 20:
        yield row(end_s - 9_000, f"{name}/registry", op="decommission")
