"""Constant load: a fixed number of devices, of which some leave and others join.

It includes all kinds of operator actions.

Rule 1: the number of a step is its random seed, so the same number gives the same step.
Rule 2: the size of a key group is bounded by the living devices and the allowed lateness; growth
beyond is a leak.
Rule 3: the rows of a step are in order of ``received_at``: operational rows at distinct instants,
rows of devices, and a tick.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fleetpulse.core.messages.decode import decode
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.rows import Origin, Row, hash64
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.tables import tables

START_MS: Final = 1_700_000_000_000
LATENESS_MS: Final = 30_000
_OWN_MS: Final = 100  # start of each step, with its operational rows
_LATE_MS: Final = 90_000
_CODES: Final = ("reconnaissance", "auth_failed", "escalation", *(f"e{number}" for number in range(20)))
_ARRIVAL: Final = {"origin": Origin.REPLAY.value, "bridge": "bench"}
_GAP_EVERY, _POLICY_EVERY, _REGISTRY_EVERY = 37, 23, 5  # steps; coprime, so that all combinations occur


@dataclass(frozen=True, slots=True)
class Load:
    """A constant load.

    Attributes:
        devices: number of living devices; each sends one message per step.
        leaving: number of devices that leave for good in a step; the same number of new devices joins.
        step_ms: event time that a step covers, milliseconds.
    """

    devices: int
    leaving: int
    step_ms: int = 20_000

    def newest_ms(self, number: int) -> int:
        """Return the ``received_at`` of a step's last row."""
        return START_MS + (number + 1) * self.step_ms - 1

    def step(self, number: int) -> pa.Table:
        """Return the rows of a step, with the columns of `MESSAGES`."""
        rng = np.random.default_rng(number)
        tick = _own_row("fleet/_/bench/tick", self.newest_ms(number))
        return pa.concat_tables([_landed(self._own(number), number), self._signals(number, rng), _landed([tick], number)])

    def _signals(self, number: int, rng: np.random.Generator) -> pa.Table:
        device = np.arange(self.devices) + number * self.leaving
        start_ms = START_MS + number * self.step_ms
        received = start_ms + rng.integers(_OWN_MS, self.step_ms - 1, self.devices)
        event = received - np.where(rng.random(self.devices) < 0.005, _LATE_MS, rng.integers(20, 1_500, self.devices))
        error = rng.random(self.devices) < 0.02
        code = rng.integers(0, len(_CODES), self.devices)
        twice = np.flatnonzero(rng.random(self.devices) < 0.01)
        places = np.concatenate([np.arange(self.devices), twice])
        arrived = np.concatenate([received, np.minimum(received[twice] + 700, self.newest_ms(number) - 1)])
        order = np.argsort(arrived, kind="stable")
        places, arrived = places[order], arrived[order]
        names = [f"meter-{each:09d}" for each in device.tolist()]
        hashes = np.array([hash64(name) for name in names], np.int64)

        def instants(values_ms: np.ndarray) -> pa.Array:
            return pa.array(values_ms * 1000).cast(pa.timestamp("us", tz="UTC"))

        def strings(values: list[str], chosen: np.ndarray, absent: np.ndarray | None = None) -> pa.Array:
            return pa.array(values).take(pa.array(chosen, mask=absent))

        count = len(places)
        of = device[places]
        columns = {
            "received_at": instants(arrived),
            "event_time": instants(event[places]),
            "kind": strings(["heartbeat", "error"], error[places].astype(np.int64)),
            "device_id": strings(names, places),
            "site": strings([f"site-{each}" for each in range(5)], of % 5),
            "clock": pa.array(["device"] * count),
            "boot": strings([f"b{each}" for each in range(500)], of % 500),
            "seq": pa.array(np.full(count, number)),
            "code": strings(list(_CODES), code[places], ~error[places]),
            "gateway": strings([f"gateway-{each}" for each in range(7)], of % 7),
            "digest": pa.array(rng.integers(-(2**63), 2**63 - 1, self.devices)[places]),
            "device_hash": pa.array(hashes[places]),
            "segment": pa.array(np.full(count, number)),
            **{name: pa.array([value] * count) for name, value in _ARRIVAL.items()},
        }
        schema = tables.arrow_schema(MESSAGES)
        return pa.table([columns.get(field.name, pa.nulls(count, field.type)) for field in schema], schema=schema)

    def _own(self, number: int) -> Iterator[Row]:
        """Yield the rows of operators and of the bridge in a step."""
        start_ms = START_MS + number * self.step_ms
        living = number * self.leaving + self.devices // 2
        if number and number % _GAP_EVERY == 0:
            yield _own_row("fleet/_/bench/gap", start_ms, op="open", **{"from": start_ms - 5_000, "after": start_ms - 1})
            yield _own_row("fleet/_/bench/gap", start_ms + 1, op="close", until=start_ms + 1)
        if number % _POLICY_EVERY == 0:
            yield _own_row("fleet/_/_/policy", start_ms + 2, policy=_policy(60 + number % 2 * 30))
        if number % _REGISTRY_EVERY == 0:
            yield _own_row(f"fleet/site-0/crane-{number:07d}/registry", start_ms + 3, op="add")
            if number:
                leaves = f"fleet/site-0/crane-{number - _REGISTRY_EVERY:07d}/registry"
                yield _own_row(leaves, start_ms + 4, op="decommission")
                held = f"fleet/site-{living % 5}/meter-{living:09d}/control"
                yield _own_row(held, start_ms + 5, op="maintain", until=start_ms + 90_000)


def _landed(rows: Iterable[Row], number: int) -> pa.Table:
    arrived = {**_ARRIVAL, "segment": number}
    return tables.to_table(MESSAGES, ({**asdict(row), "device_hash": hash64(row.device_id), **arrived} for row in rows))


def _policy(timeout_s: int) -> dict[str, Any]:
    rules = {"timeout": f"{timeout_s}s", "forget_after": f"{timeout_s + 60}s", "degraded": {"window": "2m"}}
    return parse_policy({"rules": rules}).normalised()


def _own_row(topic: str, received_at_ms: int, **content: Any) -> Row:
    row = decode(topic, json.dumps(content).encode(), received_at_ms, Origin.COMMAND)
    assert isinstance(row, Row), row
    return row
