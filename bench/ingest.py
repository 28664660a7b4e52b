"""Benchmark of ingest from a full queue, compared with ``mosquitto_sub``.

This project's bridge and landing turn the messages into fsynced, typed rows; ``mosquitto_sub`` only
reads them.

Rule 1: each contender has a separate embedded broker, filled with the same messages for a waiting
session. Of two sessions at one broker the second is always slower: when it acknowledges a message,
the broker deletes the message.
Rule 2: contenders alternate; a figure is the median of the rounds, memory the maximum.
Rule 3: CPU and memory are those of bridge and landing. The duration and CPU time of a start with an empty
queue are subtracted; it includes the pause before a connection (`io.mqtt.embedded_sessions`).
Rule 4: the broker's CPU is shown in addition, as it shares the machine with its client.
Rule 5: every message must be in bronze at the end, or there are no figures.
Rule 6: the mapped contender receives the same payloads on topics of another format, and decodes them by
a mapping that names every field.
"""

import json
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
from deltalake import DeltaTable

from bench.folders import own_folder
from bench.measure import pss_bytes, read, resident_bytes
from cli.common.output import as_table, console
from cli.supervisor.processes import Run
from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.home import BRIDGE, Home
from fleetpulse.io.mqtt import codec
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.subscriber import Receiver

COLUMNS: Final = (
    "contender", "messages", "messages_per_s", "cpu_us_per_message", "broker_us_per_message", "peak_rss_mb", "peak_pss_mb",
    "ratio", "cost_ratio", "note",
)  # fmt: skip
OURS: Final = "ours"
PEER: Final = "mosquitto_sub"
TOPICS: Final = ("fleet/#",)
MAPPED: Final = "ours, mapped"
OWN_TOPIC: Final = "fleet/site-{site}/meter-{meter:06d}/heartbeat"
MAPPED_TOPIC: Final = "meters/site-{site}/meter-{meter:06d}/state"
MAPPING: Final = """
[[mapping]]
topic = "meters/{site}/{device}/state"
kind = "heartbeat"
ts = "ts"
boot = "boot"
seq = "seq"
uptime_s = "uptime_s"
firmware = "firmware"
metrics = "metrics"
"""
ROUNDS: Final = 3
LIMIT_S: Final = 900.0  # time limit of one run
DEVICES: Final = 20_000
_IN_FLIGHT: Final = 2_000
_SEND_BYTES: Final = 256 * 1024
_SETTLE_S: Final = 3.0
_WALK_S: Final = 0.5


def payload(number: int, now_ms: int) -> bytes:
    """Return the payload of a message, about 130 bytes."""
    content = {
        "v": 1,
        "ts": now_ms - number % 15_000,
        "boot": f"b{number % 4096:04x}",
        "seq": number,
        "uptime_s": number % 1_000,
        "firmware": "1.2.3",
        "metrics": {"temperature": 21.5, "voltage": 3.3},
    }
    return json.dumps(content).encode()


def fill(address: BrokerAddress, count: int, topic: str = OWN_TOPIC) -> None:
    """Publish ``count`` messages on topics made from a template, each acknowledged by the broker.

    Raises:
        FleetError: the broker refuses the connection, or stops acknowledging.
    """
    with socket.create_connection((address.host, address.port), 5.0) as line:
        line.sendall(codec.encode_connect("fleetpulse-bench", address.username, address.password, keep_session=False))
        if line.recv(4)[-1:] != b"\x00":
            raise FleetError(f"the broker at {address} refuses the benchmark's connection", code="broker-refuses")
        line.setblocking(False)
        reader, unsent, now_ms = codec.Reader(0), bytearray(), time.time_ns() // 1_000_000
        sent = acknowledged = 0
        heard_s = time.monotonic()
        while acknowledged < count:
            while sent < count and sent - acknowledged < _IN_FLIGHT and len(unsent) < _SEND_BYTES:
                name = topic.format(site=sent % 5, meter=sent % DEVICES)
                unsent += codec.encode_publish(sent % 65_535 + 1, name, payload(sent, now_ms))
                sent += 1
            readable, writable, _ = select.select([line], [line] if unsent else [], [], 1.0)
            if writable:
                del unsent[: line.send(unsent)]
            if readable:
                reader.feed(line.recv(_SEND_BYTES))
                acknowledged, heard_s = acknowledged + len(reader.answers), time.monotonic()
                reader.answers.clear()
            if time.monotonic() - heard_s > 30.0:
                raise FleetError(
                    f"the broker acknowledged {acknowledged:,} of {sent:,} messages, and none for 30 s",
                    code="publisher-timeout",
                )


def _session(address: BrokerAddress, name: str) -> None:
    receiver, limit_s = Receiver(address, name, TOPICS), time.monotonic() + 10.0
    while not receiver.connected:
        receiver.poll(0.05)
        if time.monotonic() > limit_s:
            raise FleetError(f"the broker opened no session within 10 s: {receiver.problem}", code="broker-without-session")
    receiver.close()


def _drained_by_peer(address: BrokerAddress, count: int) -> dict[str, Any]:
    program = shutil.which(PEER)
    if program is None:
        return {"contender": PEER, "messages": count, "note": "absent: install the system package mosquitto-clients"}
    options = Path(tempfile.mkdtemp(prefix="fleetpulse-peer-"))
    try:
        (options / PEER).write_text(f"-u {address.username}\n-P {address.password}\n")  # keeps them off the command line
        command = [
            program,
            "-h",
            address.host,
            "-p",
            str(address.port),
            "-c",
            "-i",
            PEER,
            "-q",
            "1",
            "-t",
            TOPICS[0],
            "-C",
            str(count),
        ]
        began_s = time.monotonic()
        with psutil.Popen(command, stdout=subprocess.DEVNULL, env={"XDG_CONFIG_HOME": str(options)}) as peer:
            cpu_s, peak = 0.0, 0
            while peer.poll() is None:
                try:
                    times = peer.cpu_times()
                    cpu_s, peak = times.user + times.system, max(peak, peer.memory_info().rss)
                except psutil.Error:
                    break
                if time.monotonic() - began_s > LIMIT_S:
                    peer.kill()
                    return {"contender": PEER, "messages": count, "note": f"did not finish within {LIMIT_S:.0f} s"}
                time.sleep(0.05)
            code = peer.wait(10)
    finally:
        shutil.rmtree(options, ignore_errors=True)
    if code:
        return {"contender": PEER, "messages": count, "note": f"ended with exit code {code}"}
    return _figures(PEER, count, time.monotonic() - began_s, cpu_s, peak)


def _figures(name: str, count: int, wall_s: float, cpu_s: float, peak_bytes: int) -> dict[str, Any]:
    return {
        "contender": name,
        "messages": count,
        "messages_per_s": round(count / wall_s),
        "cpu_us_per_message": round(cpu_s / count * 1e6, 1),
        "peak_rss_mb": round(peak_bytes / 1e6),
    }


@dataclass(frozen=True, slots=True)
class Drained:
    """Cost of running bridge and landing.

    Attributes:
        wall_s: wall time, seconds.
        cpu_s: CPU time, seconds.
        peak_bytes: peak resident memory (RSS).
        own_bytes: peak memory with shared pages divided (PSS).
    """

    wall_s: float
    cpu_s: float
    peak_bytes: int
    own_bytes: int


def _until(run: Run, reached: Callable[[], bool]) -> Drained:
    """Run bridge and landing until a condition holds; return the cost."""
    began_s = time.monotonic()
    jobs = [run.start("landing"), run.start("bridge")]
    trees = [psutil.Process(job.pid) for job in jobs]
    peak, shared, next_s = 0, 0, 0.0
    while not reached():
        peak = max(peak, sum(resident_bytes(tree) for tree in trees))
        if time.monotonic() > next_s:  # less often: the kernel walks over all pages
            shared = max(shared, sum(pss_bytes(tree) or 0 for tree in trees))
            next_s = time.monotonic() + _WALK_S
        if time.monotonic() - began_s > LIMIT_S:
            raise FleetError(
                f"ingest did not finish within {LIMIT_S:.0f} s; see the logs in {run.home.logs}", code="bench-timeout"
            )
        time.sleep(0.05)
    wall_s, cpu_s = time.monotonic() - began_s, sum(read(tree).cpu_s for tree in trees)
    for name in ("bridge", "landing"):
        run.stop(name)
    run.jobs.clear()
    return Drained(wall_s, cpu_s, peak, shared)


def _landed(home: Home) -> int:
    table = home.table(MESSAGES.name)
    if not holds_table(table):
        return 0
    actions = DeltaTable(str(table)).get_add_actions(flatten=True)
    return sum(count or 0 for count in actions["num_records"].to_pylist())


def _idle(run: Run) -> Callable[[], bool]:
    """Return the condition that bridge and landing have been idle for `_SETTLE_S`."""
    settled_s = 0.0

    def idle() -> bool:
        nonlocal settled_s
        if not (run.status("bridge").get("connected") and run.status("landing")):
            settled_s = time.monotonic()
        return time.monotonic() - settled_s > _SETTLE_S

    return idle


def _drained_by_us(run: Run, count: int, start: Drained, name: str) -> dict[str, Any]:
    before = _landed(run.home)
    done = _until(run, lambda: int(str(run.status("landing").get("rows") or 0)) >= count)
    landed = _landed(run.home) - before
    if landed < count:
        raise FleetError(
            f"only {landed:,} of {count:,} messages are in bronze, so there are no figures; report this as a bug",
            code="bench-rows-missing",
        )
    row = _figures(name, count, done.wall_s - (start.wall_s - _SETTLE_S), done.cpu_s - start.cpu_s, done.peak_bytes)
    return row | {"peak_pss_mb": round(done.own_bytes / 1e6) or None}


def _from_full(
    run: Run, address: BrokerAddress, count: int, drained: Callable[[], dict[str, Any]], topic: str = OWN_TOPIC
) -> dict[str, Any]:
    """Fill a broker's queue, drain it, and add the broker's CPU to the row."""
    fill(address, count, topic)
    assert run.broker is not None, "the embedded broker runs"
    broker = psutil.Process(run.broker.pid)
    before_s = read(broker).cpu_s
    row = drained()
    spent_s = read(broker).cpu_s - before_s
    return row | ({"broker_us_per_message": round(spent_s / count * 1e6, 1)} if "messages_per_s" in row else {})


def _combined(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the rounds of a contender into one row."""
    failed = [row for row in rounds if "note" in row]
    if failed:
        return failed[0]
    row = dict(rounds[0])
    for name in ("messages_per_s", "cpu_us_per_message", "broker_us_per_message"):
        row[name] = round(median(one[name] for one in rounds), 1)
    for name in ("peak_rss_mb", "peak_pss_mb"):
        row[name] = max((one[name] for one in rounds if one.get(name)), default=None)
    return row


def measure(count: int, rounds: int, *, mapped: bool = False) -> list[dict[str, Any]]:
    """Fill and drain the queues in turn; return a row for each contender.

    Args:
        count: number of messages.
        rounds: number of rounds.
        mapped: whether mapped messages are measured too; the row has ``cost_ratio``, their CPU time
            divided by that of the own format.

    Raises:
        FleetError: a contender did not finish, or a message is not in bronze.
    """
    folder = Path(tempfile.mkdtemp(prefix="fleetpulse-ingest-"))
    homes = {name: Home(folder / name.split()[-1]) for name in (OURS, PEER, *([MAPPED] if mapped else []))}
    with own_folder(folder), ExitStack() as stack:
        for home in homes.values():
            home.prepare(None)
        if mapped:
            homes[MAPPED].mapping.write_text(MAPPING)
        runs = {name: stack.enter_context(Run(home)) for name, home in homes.items()}
        addresses = {name: run.use_broker(None) for name, run in runs.items()}
        _session(addresses[PEER], PEER)
        for _ in range(2):  # at the second start, the broker has sessions, as in the measured runs
            starts = {name: _until(run, _idle(run)) for name, run in runs.items() if name != PEER}
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in homes}
        for _ in range(rounds):
            for name, run in runs.items():
                drained = partial(_drained_by_peer, addresses[PEER], count)
                if name != PEER:
                    drained = partial(_drained_by_us, run, count, starts[name], name)
                topic = MAPPED_TOPIC if name == MAPPED else OWN_TOPIC
                found[name].append(_from_full(run, addresses[name], count, drained, topic))
    rows = {name: _combined(rounds_of) for name, rounds_of in found.items()}
    if "messages_per_s" in rows[PEER]:
        rows[OURS]["ratio"] = round(rows[OURS]["messages_per_s"] / rows[PEER]["messages_per_s"], 2)
    if mapped:
        rows[MAPPED]["cost_ratio"] = round(rows[MAPPED]["cpu_us_per_message"] / rows[OURS]["cpu_us_per_message"], 2)
    return list(rows.values())


def bench_ingest(*, quick: bool, messages: int | None, json_lines: bool, mapped: bool = False) -> None:
    """Run the ingest benchmark, and print its results."""
    count = messages or (100_000 if quick else 1_000_000)
    rows: list[Mapping[str, Any]] = [*measure(count, 1 if quick else ROUNDS, mapped=mapped)]
    if json_lines:
        sys.stdout.writelines(json.dumps({name: row.get(name) for name in COLUMNS}) + "\n" for row in rows)
    else:
        console().print(as_table(rows, COLUMNS, f"ingest ({BRIDGE})"))
