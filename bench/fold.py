"""Benchmark of the fold without Spark: CPU of a message.

It measures a key group of usual size, and one with a single hot device.

Rule: a call includes reading and writing the stored form, but not the generation of its input.
"""

import json
import sys
import time
from statistics import median
from typing import Final

import numpy as np
import pyarrow as pa

from cli.common.output import as_table, console
from fleetpulse.columnar.codec.arrow import KINDS, SIGNAL_SCHEMA
from fleetpulse.columnar.fold.key_group import KeyGroup, begin
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Kind

_START_MS: Final = 1_700_000_000_000
_SPAN_MS: Final = 60_000
_CALLS: Final = 12
_DEPLOYMENT: Final = Deployment(30_000)
SHAPES: Final = (("a group", 8_000, 12), ("a hot device", 1, 60_000))
COLUMNS: Final = ("shape", "devices", "messages", "us_a_message")


def _block(devices: int, each: int, call: int) -> pa.RecordBatch:
    """Generate the heartbeats of ``devices`` in a minute, at distinct instants."""
    count = devices * each
    device_numbers, number = np.arange(count) % devices, np.arange(count) // devices
    at_ms = _START_MS + call * _SPAN_MS + number * (_SPAN_MS // each) + (device_numbers % max(1, _SPAN_MS // each))
    same = {"site": "main", "code": None, "firmware": None, "gateway": "gateway-1"}
    columns = {name: pa.array([value] * count, SIGNAL_SCHEMA.field(name).type) for name, value in same.items()}
    columns |= {
        "device_id": pa.array([f"device-{one:06}" for one in device_numbers], pa.string()),
        "received_at_ms": pa.array(np.sort(at_ms)),
        "position": pa.array(np.zeros(count, np.int64)),
        "presence_ms": pa.array(at_ms),
        "offset_ms": pa.array(np.zeros(count, np.int64)),
        "trust": pa.array(np.zeros(count, np.int8)),
        "kind": pa.array(np.full(count, KINDS.index(Kind.HEARTBEAT), np.int8)),
        "device_clock": pa.array(np.ones(count, bool)),
        "boot": pa.array(["boot-1"] * count),
        "session": pa.nulls(count, pa.string()),
        "seq": pa.array(call * each + number),
        "digest": pa.array(np.zeros(count, np.int64)),
    }
    return pa.RecordBatch.from_pydict({name: columns[name] for name in SIGNAL_SCHEMA.names}, schema=SIGNAL_SCHEMA)


def cpu_us_per_message(devices: int, each: int) -> float:
    """Return the median CPU time of a message in a call, microseconds."""
    stored, chunks, costs = begin(_START_MS).to_bytes(), dict[int, bytes](), list[float]()
    for call in range(_CALLS):
        block = _block(devices, each, call)
        began = time.process_time()
        group = KeyGroup.from_bytes(stored)
        step = group.fold(block, [], _START_MS + (call + 1) * _SPAN_MS, _DEPLOYMENT, chunks.__getitem__)
        chunks |= dict(step.chunks)
        stored = group.to_bytes()
        costs.append((time.process_time() - began) / block.num_rows * 1e6)
        for number in step.deleted_chunks:
            del chunks[number]
    return median(costs[2:])


def bench_fold(*, json_lines: bool) -> None:
    """Measure all shapes, and print the results."""
    rows = [
        {"shape": name, "devices": devices, "messages": each, "us_a_message": round(cpu_us_per_message(devices, each), 3)}
        for name, devices, each in SHAPES
    ]
    if json_lines:
        sys.stdout.writelines(json.dumps(row) + "\n" for row in rows)
    else:
        console().print(as_table(rows, COLUMNS, "fold"))
