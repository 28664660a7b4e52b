"""Flink peer: a KeyedProcessFunction with event-time timers.

It runs in PyFlink's environment.

Rule 1: it runs ``bench.peers.python_fold``, as the other Python peers do, with one lazy timer per device.
Rule 2: Flink's watermark is ``received_at`` minus the allowed lateness, and so equals the frontier.
Rows are judged by the watermark only: rows of one device from two sources may have any order.
Rule 3: the JVM reads the Parquet file, keeps the state in RocksDB and writes checkpoints. Python
handles keys, rows and timers.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pyflink.common import Configuration, Encoder, Types
from pyflink.datastream import KeyedProcessFunction, RuntimeContext, StreamExecutionEnvironment
from pyflink.datastream.connectors.file_system import BucketAssigner, FileSink, OutputFileConfig, RollingPolicy
from pyflink.datastream.state import ValueStateDescriptor
from pyflink.table import StreamTableEnvironment

from bench.lifecycle.serving import serve
from bench.peers.python_fold import NEVER, TIMER, UNKNOWN, Fold, Rules

NAMES: Final = ("device_id", "transition_no", "from_mode", "to_mode", "trigger", "event_time_ms", "runtime_ms")


class Device(KeyedProcessFunction):
    """Process function, called per device for each message and for its timer."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def open(self, runtime_context: RuntimeContext) -> None:
        """Declare the state."""
        self.device = runtime_context.get_state(ValueStateDescriptor("device", Types.PICKLED_BYTE_ARRAY()))

    def process_element(self, value: Any, ctx: Any) -> Iterator[str]:
        """Add a message, and fold up to the frontier."""
        device_id, event_ms, received_ms, boot, seq, code = value[0], value[1], value[2], value[3], value[4], value[5]
        known = self.device.value() or UNKNOWN
        fold = Fold(device_id, known, self.rules)
        fold.take(event_ms, received_ms, boot, seq, code)
        timers = ctx.timer_service()
        fold.fold_to(timers.current_watermark())
        self.device.update(fold.to_state(self._arm(timers, known[TIMER], fold.wake_at())))
        for row in fold.out:
            yield json.dumps(dict(zip(NAMES, row, strict=True)))

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[str]:
        """Advance a device's time to the watermark."""
        timers = ctx.timer_service()
        fold = Fold(ctx.get_current_key(), self.device.value() or UNKNOWN, self.rules)
        fold.fold_to(max(timestamp, timers.current_watermark()))
        self.device.update(fold.to_state(self._arm(timers, NEVER, fold.wake_at())))
        for row in fold.out:
            yield json.dumps(dict(zip(NAMES, row, strict=True)))

    def _arm(self, timers: Any, registered: int, due: int) -> int:
        if due == NEVER or (registered != NEVER and registered <= due):
            return registered
        if registered != NEVER:
            timers.delete_event_time_timer(registered)
        timers.register_event_time_timer(due)
        return due


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run over a Parquet file, to its end.

    Args:
        request: ``file``, ``place`` (folder of the run), ``rules``, ``jars`` (their URLs) and
            ``mode`` (thread or process).
    """
    place, rules = Path(request["place"]), Rules(*request["rules"])
    settings = Configuration()
    for name, value in {
        "parallelism.default": "2",
        "pipeline.jars": ";".join(request["jars"]),
        "python.executable": sys.executable,
        "python.execution-mode": request["mode"],
        "python.state.cache-size": "100000",
        "python.fn-execution.bundle.size": "100000",
        "state.backend.type": "rocksdb",
        "execution.checkpointing.incremental": "true",
        "execution.checkpointing.interval": "5 s",
        "execution.checkpointing.dir": (place / "checkpoint").as_uri(),
        "execution.checkpointing.storage": "filesystem",
        "taskmanager.memory.managed.size": "1 gb",
        "taskmanager.numberOfTaskSlots": "2",
        "rest.port": "0",
        "rest.bind-address": "127.0.0.1",
    }.items():
        settings.set_string(name, value)
    environment = StreamExecutionEnvironment.get_execution_environment(settings)
    tables = StreamTableEnvironment.create(environment)
    tables.execute_sql(f"""
        CREATE TEMPORARY TABLE messages (
            device_id STRING, event_ms BIGINT, received_ms BIGINT, boot STRING, seq BIGINT, code STRING,
            received_at AS TO_TIMESTAMP_LTZ(received_ms, 3),
            WATERMARK FOR received_at AS received_at - INTERVAL '{rules.lateness // 1000}' SECOND
        ) WITH ('connector' = 'filesystem', 'path' = '{Path(request["file"]).as_uri()}', 'format' = 'parquet')
    """)
    rows = tables.to_data_stream(tables.from_path("messages"))
    sink = (
        FileSink.for_row_format(str(place / "out"), Encoder.simple_string_encoder())
        .with_bucket_assigner(BucketAssigner.base_path_bucket_assigner())
        .with_rolling_policy(RollingPolicy.on_checkpoint_rolling_policy())
        .with_output_file_config(OutputFileConfig.builder().with_part_suffix(".json").build())
        .build()
    )
    keyed = rows.key_by(lambda row: row[0], key_type=Types.STRING())
    keyed.process(Device(rules), output_type=Types.STRING()).sink_to(sink)
    environment.execute("bench")
    return {"batch_ms": []}


if __name__ == "__main__":
    serve(run)
