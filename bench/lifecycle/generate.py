"""Generated input of a benchmark: a table of messages, one version per batch.

Rule 1: the same `Fleet` gives the same rows: all random values follow from its seed.
Rule 2: no message is late: messages out of order and duplicates arrive in the allowed lateness.
Rule 3: rows are in order of ``received_at``, in several Parquet files per version, as landing
writes.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from fleetpulse.core.errors import Misuse
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.rows import EVERYONE, hash64
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.tables.tables import arrow_schema
from fleetpulse.paths import cache_dir

FORMAT: Final = 3  # version of the generated rows: increment it with every change, so that no old input is reused
START_MS: Final = 1_700_000_000_000
LATENESS_MS: Final = 30_000
FILES: Final = 2  # files per version, unless a fleet has another number
QUIET_HOUR_MS: Final = 3_600_000  # duration of the unmeasured first batch if few devices are active
TIMEOUT_MS: Final = {1: 180_000, 20: QUIET_HOUR_MS}  # by `Fleet.one_in`: longer for a fleet that reports rarely
SHORT_BATCHES: Final = 3  # up to this number of batches the timeout is half of their duration, so that deadlines occur
DEGRADED_ERRORS: Final = 3
DEGRADED_WINDOW_MS: Final = 120_000
SEQUENCE: Final = ("reconnaissance", "auth_failed", "escalation")
CODES: Final = (*(f"e{number}" for number in range(1, 51)), *SEQUENCE)
KINDS: Final = ("heartbeat", "error")
_HEARTBEAT, _ERROR, _POLICY = 0, 1, 2
_LEAST_PERIOD_MS: Final = 3  # between two messages of a device, so that one out of order fits in between
_LONGEST_DELAY_MS: Final = 25_000  # of a message out of order
_LONGEST_REPEAT_MS: Final = 28_500  # of a duplicate


@dataclass(frozen=True, slots=True)
class Fleet:
    """Parameters of a generated input.

    Attributes:
        devices: number of devices.
        messages: number of messages of an active device in a batch, evenly spaced.
        batches: number of batches; the first is not measured.
        one_in: inverse of the share of active devices in a batch: 1 (all) or 20.
        span_ms: event time that a batch covers, milliseconds.
        seed: seed of all random values.
        files: files per version.
    """

    devices: int
    messages: int
    batches: int = 6
    one_in: int = 1
    span_ms: int = 60_000
    seed: int = 7
    files: int = FILES

    def __post_init__(self) -> None:
        most = self.span_ms // _LEAST_PERIOD_MS
        if not 1 <= self.messages <= most:
            raise Misuse(
                f"an input has 1 to {most:,} messages of each device in a batch; got {self.messages:,} for {self.devices:,} "
                f"devices; use another size",
                code="bench-input-invalid",
            )

    @property
    def name(self) -> str:
        """Folder name of the stored input."""
        return f"f{FORMAT}-" + "-".join(str(value) for value in asdict(self).values())

    @property
    def timeout_ms(self) -> int:
        """Silence after which a device is offline."""
        if self.one_in == 1 and self.batches <= SHORT_BATCHES:
            return self.batches * self.span_ms // 2
        return TIMEOUT_MS[self.one_in]

    def begin_ms(self, batch: int) -> int:
        """Return the start of a batch, epoch milliseconds.

        If few devices are active, the first batch has an hour, with one message of each device.
        """
        if self.one_in == 1 or batch == 0:
            return START_MS + batch * self.span_ms
        return START_MS + QUIET_HOUR_MS + (batch - 1) * self.span_ms


@dataclass(frozen=True, slots=True)
class Input:
    """A generated input.

    Attributes:
        fleet: parameters of the input.
        path: path of the table of messages.
        counts: number of rows of each batch.
        newest_ms: ``received_at`` of the last row, epoch milliseconds.
    """

    fleet: Fleet
    path: Path
    counts: tuple[int, ...]
    newest_ms: int

    @property
    def judged_to_ms(self) -> int:
        """End of comparisons: 1 s before the frontier, where contenders may differ."""
        return self.newest_ms - LATENESS_MS - 1_000


def prepare(fleet: Fleet, folder: Path | None = None) -> Input:
    """Return the input for a fleet; generate it unless the project's cache has it."""
    place = (folder or cache_dir() / "bench" / "input") / fleet.name
    facts = place / "facts.json"
    if not facts.exists():
        fresh = place.with_name(f".{place.name}.{os.getpid()}")
        shutil.rmtree(fresh, ignore_errors=True)
        counts, newest_ms = _write(fleet, fresh / "messages")
        (fresh / "facts.json").write_text(json.dumps({"counts": counts, "newest_ms": newest_ms}))
        shutil.rmtree(place, ignore_errors=True)
        fresh.rename(place)
        for other in place.parent.glob("f*-*"):
            if not other.name.startswith(f"f{FORMAT}-"):  # an input of an older format: gigabytes that are not used again
                shutil.rmtree(other, ignore_errors=True)
    found = json.loads(facts.read_text())
    return Input(fleet, place / "messages", tuple(found["counts"]), found["newest_ms"])


@dataclass(frozen=True, slots=True)
class _Devices:
    """Random values of each device, one array element per device."""

    phase_ms: np.ndarray
    silent_from_ms: np.ndarray
    back_at_ms: np.ndarray
    flaky: np.ndarray
    attacked: np.ndarray
    turn: np.ndarray
    boot: np.ndarray


def _devices(fleet: Fleet, rng: np.random.Generator) -> _Devices:
    count, end_ms = fleet.devices, fleet.begin_ms(fleet.batches) - START_MS
    silent = rng.random(count) < 0.02
    never = np.iinfo(np.int64).max
    if fleet.one_in == 1:
        latest_ms = max(15_000, end_ms - fleet.timeout_ms - 50_000)
        silent_from = np.where(silent, rng.integers(10_000, latest_ms, count), never)
        phase = rng.integers(0, fleet.span_ms // fleet.messages, count)
    else:  # silent devices send at the start of the hour, the others at its end
        silent_from = np.where(silent, QUIET_HOUR_MS, never)
        last = rng.integers(QUIET_HOUR_MS // 3 * 2, QUIET_HOUR_MS - _LONGEST_DELAY_MS, count)
        phase = np.where(silent, rng.integers(0, end_ms - QUIET_HOUR_MS, count), last)
    back = np.where(
        silent & (rng.random(count) < 0.5), silent_from + fleet.timeout_ms + rng.integers(5_000, 15_000, count), never
    )
    if fleet.one_in != 1:
        back = np.where(back < never, phase + fleet.timeout_ms + 5_000, never)
    return _Devices(
        phase,
        silent_from,
        back,
        flaky=rng.random(count) < 0.05,
        attacked=rng.random(count) < 0.002,
        turn=rng.integers(0, fleet.one_in, count),
        boot=rng.integers(0, 4096, count),
    )


_ROW: Final = np.dtype(
    [
        ("device", "i4"),
        ("kind", "i1"),
        ("code", "i1"),
        ("seq", "i8"),
        ("event_ms", "i8"),
        ("received_ms", "i8"),
        ("digest", "i8"),
    ]
)


def _batches(fleet: Fleet) -> Iterator[np.ndarray]:
    """Yield the rows of each batch, in order of ``received_at``."""
    rng = np.random.default_rng(fleet.seed)
    devices = _devices(fleet, rng)
    carried = np.zeros(0, _ROW)
    for batch in range(fleet.batches):
        scheduled = _scheduled(fleet, devices, batch, rng)
        sent = np.concatenate([scheduled, _held_back(fleet, scheduled, rng)])
        _errors(devices, sent, rng)
        sent["digest"] = rng.integers(-(2**63), 2**63 - 1, len(sent))
        rows = np.concatenate([carried, sent, _repeated(sent, rng)])
        rows = rows[np.argsort(rows["received_ms"], kind="stable")]
        cut = int(np.searchsorted(rows["received_ms"], fleet.begin_ms(batch + 1)))
        carried = rows[cut:]
        yield rows[:cut]


def _scheduled(fleet: Fleet, devices: _Devices, batch: int, rng: np.random.Generator) -> np.ndarray:
    quiet_hour = fleet.one_in != 1 and batch == 0
    each = 1 if quiet_hour else fleet.messages
    period_ms = fleet.span_ms // fleet.messages
    active = np.arange(fleet.devices)
    if fleet.one_in != 1 and not quiet_hour:
        active = active[(devices.turn + batch) % fleet.one_in == 0]
    place = np.tile(np.arange(each), len(active))
    rows = np.zeros(len(place), _ROW)
    rows["device"] = np.repeat(active, each)
    phase_ms = devices.phase_ms if fleet.one_in == 1 or quiet_hour else devices.phase_ms % period_ms
    rows["event_ms"] = fleet.begin_ms(batch) + place * period_ms + phase_ms[rows["device"]]
    rows["received_ms"] = rows["event_ms"] + rng.integers(20, 1_500, len(rows))
    rows["seq"] = (batch * fleet.messages + place) * 2 + 2
    since_ms = rows["event_ms"] - START_MS
    quiet = (since_ms >= devices.silent_from_ms[rows["device"]]) & (since_ms < devices.back_at_ms[rows["device"]])
    return rows[~quiet]


def _held_back(fleet: Fleet, scheduled: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return messages out of order, 5 % of all.

    Each is sent before a scheduled message, and received after it.
    """
    rows = scheduled[rng.random(len(scheduled)) < 0.0527].copy()
    period_ms = fleet.span_ms // fleet.messages
    before_ms = rng.integers(1, min(20_000, period_ms - 1), len(rows))
    delay_ms = rows["received_ms"] - rows["event_ms"] + before_ms
    rows["received_ms"] += 1 + (rng.random(len(rows)) * (_LONGEST_DELAY_MS - delay_ms)).astype(np.int64)
    rows["event_ms"] -= before_ms
    rows["seq"] -= 1
    return rows


def _repeated(sent: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return duplicates of messages, 1 % of all."""
    rows = sent[rng.random(len(sent)) < 0.0101].copy()
    delay_ms = rows["received_ms"] - rows["event_ms"]
    rows["received_ms"] += 1 + (rng.random(len(rows)) * (_LONGEST_REPEAT_MS - delay_ms)).astype(np.int64)
    return rows


def _errors(devices: _Devices, rows: np.ndarray, rng: np.random.Generator) -> None:
    attacked = devices.attacked[rows["device"]]
    likely = np.where(attacked, 0.7, np.where(devices.flaky[rows["device"]], 0.4, 0.01))
    rows["kind"] = rng.random(len(rows)) < likely
    code = rng.integers(0, 50, len(rows))
    rare = rng.random(len(rows)) < 0.01
    step = np.where(attacked, rows["seq"] // 2, rng.integers(0, len(SEQUENCE), len(rows))) % len(SEQUENCE)
    rows["code"] = np.where(attacked | rare, 50 + step, code)


def _write(fleet: Fleet, path: Path) -> tuple[list[int], int]:
    path.mkdir(parents=True)
    schema = arrow_schema(MESSAGES)
    table = DeltaTable.create(str(path), schema=schema)
    ids = [f"meter-{number:07d}" for number in range(fleet.devices)]
    names = pa.array([*ids, EVERYONE])
    hashes = np.array([*map(hash64, ids), hash64(EVERYONE)], np.int64)
    boots = _devices(fleet, np.random.default_rng(fleet.seed)).boot
    counts: list[int] = []
    newest_ms = 0
    for batch, rows in enumerate(_batches(fleet)):
        if batch == 0:
            rows = np.concatenate([_policy_row(fleet), rows])
        counts.append(len(rows))
        newest_ms = max(newest_ms, int(rows["received_ms"].max()))
        columns = _columns(fleet, rows, names, hashes, boots, batch)
        content = pa.table([columns.get(field.name, pa.nulls(len(rows), field.type)) for field in schema], schema=schema)
        share = -(-len(rows) // fleet.files)
        actions = [
            _add(path, f"batch-{batch:04d}-{file}.parquet", content.slice(file * share, share), batch * fleet.files + file)
            for file in range(fleet.files)
        ]
        table.create_write_transaction(actions, "append", schema)
    return counts, newest_ms


def _policy_row(fleet: Fleet) -> np.ndarray:
    row = np.zeros(1, _ROW)
    row["device"], row["kind"], row["received_ms"] = fleet.devices, _POLICY, START_MS - 60_000
    return row


def policy_body(fleet: Fleet) -> str:
    """Return the body of the policy row."""
    window, timeout = f"{DEGRADED_WINDOW_MS // 1000}s", f"{fleet.timeout_ms // 1000}s"
    rules = {"timeout": timeout, "degraded": {"errors": DEGRADED_ERRORS, "window": window}}
    policy = parse_policy({"rules": rules}).normalised()
    return json.dumps({"effective_from": 0, "policy": policy}, separators=(",", ":"), sort_keys=True)


def _columns(
    fleet: Fleet, rows: np.ndarray, names: pa.Array, hashes: np.ndarray, boots: np.ndarray, batch: int
) -> dict[str, pa.Array]:
    count = len(rows)
    own = rows["kind"] == _POLICY
    device = np.where(own, 0, rows["device"])

    def instant(column: str) -> pa.Array:
        return pa.array(rows[column] * 1000).cast(pa.timestamp("us", tz="UTC"))

    def chosen(values: list[str], index: np.ndarray, absent: np.ndarray = own) -> pa.Array:
        return pa.array(values).take(pa.array(index.astype(np.int64), mask=absent))

    def same(value: str) -> pa.Array:
        return pa.array([value]).take(pa.array(np.zeros(count, np.int64)))

    return {
        "received_at": instant("received_ms"),
        "event_time": instant("event_ms"),
        "kind": chosen([*KINDS, "policy"], rows["kind"], np.zeros(count, bool)),
        "device_id": names.take(pa.array(rows["device"])),
        "site": chosen(
            [*(f"site-{number}" for number in range(5)), EVERYONE], np.where(own, 5, device % 5), np.zeros(count, bool)
        ),
        "clock": chosen(["device", "received"], own.astype(np.int64), np.zeros(count, bool)),
        "boot": chosen([f"b{number:03x}" for number in range(4096)], boots[device]),
        "seq": pa.array(rows["seq"], mask=own),
        "code": chosen(list(CODES), np.where(own, 0, rows["code"]), rows["kind"] != _ERROR),
        "gateway": chosen([f"gateway-{number}" for number in range(7)], device % 7),
        "body": pa.array([policy_body(fleet)]).take(pa.array(np.zeros(count, np.int64), mask=~own)),
        "digest": pa.array(rows["digest"]),
        "device_hash": pa.array(hashes[rows["device"]]),
        "origin": same("mqtt"),
        "bridge": same("bench"),
        "segment": pa.array(np.full(count, batch + 1)),
    }


def _add(path: Path, name: str, content: pa.Table, number: int) -> AddAction:
    pq.write_table(content, path / name)
    stats = json.dumps({"numRecords": content.num_rows})
    return AddAction(name, (path / name).stat().st_size, {}, START_MS + number, data_change=True, stats=stats)


def fingerprint(*paths: Path) -> str:
    """Return a digest of the contents of files, 16 hexadecimal digits."""
    found = blake2b(digest_size=8)
    for path in sorted(paths):
        found.update(path.read_bytes())
    return found.hexdigest()
