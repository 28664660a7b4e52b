"""Plain fold of the benchmark peers: it emits the transitions of the definition for any cut of its input."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest

from bench.lifecycle.contenders import rules
from bench.lifecycle.generate import KINDS, LATENESS_MS, Fleet, prepare
from bench.peers.python_fold import NEVER, UNKNOWN, Fold, State
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Row
from fleetpulse.io.delta.log import DeltaLog
from tests.support.histories.histories import stored_rows

pytestmark = pytest.mark.property


def test_the_fold_of_the_peers_equals_the_definition(tmp_path: Path) -> None:
    source = prepare(Fleet(devices=1_000, messages=6), tmp_path)
    log = DeltaLog(source.path)
    paths = [path for version in range(log.latest() + 1) for path, _ in log.appended(version)]
    rows = [row for path in paths for row in stored_rows(pq.ParquetFile(path).read())]
    wanted = [
        (one.device_id, one.transition_no, one.from_mode, one.to_mode, one.trigger, one.event_time_ms, one.runtime_ms)
        for one in replay(rows, Deployment(LATENESS_MS, 300_000))
        if one.kind == "transition" and one.event_time_ms is not None and one.event_time_ms <= source.judged_to_ms
    ]
    found: list[tuple[Any, ...]] = []
    states: dict[str, State] = {}
    random, begin = Random(7), 0
    while begin < len(rows):
        end = begin + random.randrange(1, 20_000)
        by_device: dict[str, list[Row]] = {}
        for row in rows[begin:end]:
            if row.kind in KINDS:
                by_device.setdefault(row.device_id, []).append(row)
        for device_id, messages in by_device.items():
            fold = Fold(device_id, states.get(device_id, UNKNOWN), rules(source))
            for one in messages:
                assert one.event_time_ms is not None and one.boot is not None and one.seq is not None
                fold.take(one.event_time_ms, one.received_at_ms, one.boot, one.seq, one.code or "")
            fold.fold_to(fold.frontier(0))
            found += fold.out
            states[device_id] = fold.to_state(NEVER)
        begin = end
    for device_id, state in states.items():
        fold = Fold(device_id, state, rules(source))
        fold.fold_to(source.judged_to_ms)
        found += fold.out
    kept = [row for row in found if row[5] <= source.judged_to_ms]
    assert Counter(kept) == Counter(wanted)
    assert {row[4] for row in kept} >= {"signal", "silence", "errors", "recovered", "sequence"}
