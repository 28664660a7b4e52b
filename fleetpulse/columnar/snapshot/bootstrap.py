"""Bootstrap of key groups from a list of registered devices.

Rule 1: imported devices are judged up to the frontier. A deadline at or before the frontier has
fired, and its transition is not emitted.
Rule 2: every key group is created, also one without devices. Coverage, frontiers and policies are
the same in all of them.
Rule 3: a run with these key groups emits the same judgements as a run that has the registry's rows
first (``tests/property/columnar/snapshot/test_bootstrap.py``).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from fleetpulse.columnar.codec.hashing import hashes_of
from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.fold.judge import FoldCall
from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.columnar.jit.context import MODES, NONE, Int64s
from fleetpulse.columnar.jit.layout import (
    BOOT,
    CLASS,
    CLASS_SINCE,
    CLOCK,
    EXCUSED,
    FIRMWARE,
    GATEWAY,
    LIFE,
    MEMORY,
    MODE,
    MODE_SINCE,
    NUMBER,
    OWN_GRACE,
    OWN_TIMEOUT,
    QUIET_COVERED,
    QUIET_SINCE,
    REBOOTS,
    RUNTIME,
    SEQ,
    SITE,
    SPEAKS_FROM,
    SPOKE_FROM,
)
from fleetpulse.columnar.state.devices import Devices
from fleetpulse.core.errors import FleetError
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.messages.text import MAX_ID_BYTES, MAX_TEXT
from fleetpulse.core.policy import DEFAULT_CLASS, Policies
from fleetpulse.core.presence.shards import Advance, Shards
from fleetpulse.core.registry.registry import LIMITS, limits
from fleetpulse.core.rows import EVERYONE

REGISTERED_SCHEMA: Final = pa.schema(
    [
        ("device_id", pa.string()),
        ("site", pa.string()),
        ("device_class", pa.string()),  # null: the default class
        ("gateway", pa.string()),  # null: no gateway
        ("registered_at", pa.timestamp("us", tz="UTC")),
    ]
)
CLASS_SINCE_FIELD: Final = pa.field("class_since", pa.timestamp("us", tz="UTC"))  # may be absent; null: registered_at
LIMIT_FIELDS: Final = tuple(pa.field(name, pa.int64()) for name in LIMITS)  # may be absent; null: limit of the class
CHUNKS: Final = pa.list_(pa.struct([("number", pa.int64()), ("rows", pa.binary())]))  # pending rows, see `fold.pending`
BOOTSTRAP_SCHEMA: Final = pa.schema([("key_group", pa.int32()), ("block", pa.binary()), ("chunks", CHUNKS)])


def bootstrap_groups(registered: pa.Table, shards: Shards, policies: Policies, key_groups: int) -> pa.Table:
    """Return the stored form of every key group, with the devices that belong to it.

    Args:
        registered: one row for each device: columns of `REGISTERED_SCHEMA`, and optionally
            `CLASS_SINCE_FIELD` and `LIMIT_FIELDS`; other columns are ignored.
        shards: coverage and frontier of every site, see `Shards.judged_through`.
        policies: policies in force from the first registration on.
        key_groups: number of key groups.

    Returns:
        Columns of `BOOTSTRAP_SCHEMA`, one row for each key group.

    Raises:
        FleetError: the list is invalid, see `validated_devices`.
    """
    devices = validated_devices(registered, shards.least_frontier_ms)
    groups = hashes_of(devices["device_id"]) % key_groups
    order = np.argsort(groups, kind="stable")
    devices, groups = devices.take(pa.array(order)), groups[order]
    edges = np.searchsorted(groups, np.arange(key_groups + 1)).tolist()
    blocks = [
        _group(devices.slice(edges[group], edges[group + 1] - edges[group]), shards, policies).to_bytes()
        for group in range(key_groups)
    ]
    nothing = pa.array([[]] * key_groups, CHUNKS)
    return pa.table([pa.array(range(key_groups), pa.int32()), pa.array(blocks, pa.binary()), nothing], schema=BOOTSTRAP_SCHEMA)


def as_registered(table: pa.Table) -> pa.Table:
    """Return the columns of `REGISTERED_SCHEMA` in its types.

    A timestamp without a time zone is UTC.

    Raises:
        FleetError: a column is absent or duplicate, or ``registered_at`` is neither a timestamp nor
            text. A number is refused because it has no unit.
        pa.ArrowException: a column cannot be cast to its type.
    """
    if absent := [name for name in REGISTERED_SCHEMA.names if name not in table.column_names]:
        raise FleetError(
            f"a table of devices has the columns {', '.join(REGISTERED_SCHEMA.names)}; absent: {', '.join(absent)}",
            code="list-column-missing",
        )
    require_once(table.column_names)
    kind = table.schema.field("registered_at").type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(fits(kind) for fits in (pa.types.is_timestamp, pa.types.is_string, pa.types.is_large_string, pa.types.is_null)):
        raise FleetError(
            f'the column "registered_at" of a table of devices holds timestamps, or text such as 2026-01-31T12:00:00Z; '
            f"got {kind}; cast it: a number does not show whether it is seconds, milliseconds or microseconds",
            code="list-instant-invalid",
        )
    return table.select(REGISTERED_SCHEMA.names).cast(REGISTERED_SCHEMA)


def require_once(names: Sequence[str]) -> None:
    """Refuse a table of devices with duplicate column names.

    Raises:
        FleetError: two columns have the same name.
    """
    if twice := [(name, count) for name, count in Counter(names).items() if count > 1]:
        name, count = twice[0]
        raise FleetError(
            f'column names of a table of devices must be unique; got "{name}" {count} times; keep one of them',
            code="list-column-twice",
        )


def validated_devices(registered: pa.Table, frontier_ms: int | None) -> pa.Table:
    """Validate a list of devices.

    Args:
        registered: list of devices, see `bootstrap_groups`.
        frontier_ms: frontier up to which the devices are judged, epoch milliseconds.

    Returns:
        Columns of `REGISTERED_SCHEMA`, `LIMIT_FIELDS` and `CLASS_SINCE_FIELD`.

    Raises:
        FleetError: a column or value is absent or too long, a device is listed twice or registered
            after the frontier, or there is no frontier. See also `as_registered`.
    """
    if frontier_ms is None:
        raise FleetError(
            "importing devices needs a frontier; got none; name the instant up to which they are judged",
            code="frontier-missing",
        )
    devices = as_registered(registered)
    for name in ("device_id", "site", "registered_at"):
        if devices[name].null_count:
            raise FleetError(f"every device has a {name}; {devices[name].null_count} have none", code="list-value-missing")
    if pc.any(pc.equal(devices["device_id"], EVERYONE), min_count=0).as_py():
        raise FleetError(f'"{EVERYONE}" is not a device id: it stands for all devices; remove it', code="device-id-reserved")
    _require_short(devices)
    counted = pc.value_counts(devices["device_id"])
    twice = counted.filter(pc.greater(counted.field("counts"), 1))
    if len(twice):
        raise FleetError(
            f'each device must be listed once; got "{twice[0]["values"]}" {twice[0]["counts"]} times '
            f"(duplicate devices: {len(twice)}); keep one row of each",
            code="list-device-twice",
        )
    after = devices.filter(pc.greater(devices["registered_at"].cast(pa.int64()), frontier_ms * 1000))
    if len(after):
        raise FleetError(
            f"imported devices must be registered at or before the frontier; {len(after)} are registered later, "
            f'"{after["device_id"][0]}" among them; publish registry rows for these, or name a later frontier',
            code="list-registered-later",
        )
    for field in LIMIT_FIELDS:
        devices = devices.append_column(field, _limit(registered, field))
    return devices.append_column(CLASS_SINCE_FIELD, _class_since(registered, devices["registered_at"]))


def _limit(registered: pa.Table, field: pa.Field) -> pa.Array | pa.ChunkedArray:
    """Return and validate a limit column of the list; nulls if it is absent."""
    if field.name not in registered.column_names:
        return pa.nulls(len(registered), field.type)
    found = registered[field.name].cast(field.type)
    for value in pc.unique(found).to_pylist():
        try:
            limits({field.name: value})
        except ValueError as fault:
            raise FleetError(str(fault), code="limit-invalid") from None
    return found


def _require_short(devices: pa.Table) -> None:
    """Refuse text longer than a message can have: the size of state is bounded."""
    for names, size_of, most, unit in (
        (("device_id",), pc.binary_length, 2 * MAX_ID_BYTES + 1, "bytes"),  # the id can include the site
        (("site",), pc.binary_length, MAX_ID_BYTES, "bytes"),
        (("device_class",), pc.utf8_length, MAX_TEXT, "characters"),
        (("gateway",), pc.utf8_length, MAX_TEXT + MAX_ID_BYTES + 1, "characters"),
    ):
        for name in names:
            size = pc.max(size_of(devices[name])).as_py() or 0
            if size > most:
                raise FleetError(
                    f"a {name} of a table of devices has at most {most} {unit}; got one of {size:,}; shorten it",
                    code="list-text-too-long",
                )


def _class_since(registered: pa.Table, otherwise: pa.ChunkedArray) -> pa.ChunkedArray:
    if CLASS_SINCE_FIELD.name not in registered.column_names:
        return otherwise
    return pc.coalesce(registered[CLASS_SINCE_FIELD.name].cast(CLASS_SINCE_FIELD.type), otherwise)


def _group(registered: pa.Table, shards: Shards, policies: Policies) -> KeyGroup:
    devices = Devices()
    devices.admit(registered["device_id"].combine_chunks())
    rows = devices.rows
    since_ms = registered["registered_at"].cast(pa.int64()).to_numpy() // 1000
    for field in (LIFE, QUIET_SINCE, MODE_SINCE):
        rows[:, field] = since_ms
    rows[:, CLASS_SINCE] = registered[CLASS_SINCE_FIELD.name].cast(pa.int64()).to_numpy() // 1000
    rows[:, MODE] = MODES.index(Mode.PROVISIONED)
    rows[:, [NUMBER, REBOOTS, RUNTIME, EXCUSED, CLOCK]] = 0
    rows[:, [BOOT, SEQ, MEMORY]] = -1
    rows[:, SITE] = devices.sites.numbers(_dictionary(registered["site"]))
    rows[:, CLASS] = devices.classes.numbers(_dictionary(pc.fill_null(_empty_as_null(registered["device_class"]), DEFAULT_CLASS)))
    rows[:, GATEWAY] = devices.gateways.numbers(_dictionary(_empty_as_null(registered["gateway"])))
    rows[:, [FIRMWARE, SPEAKS_FROM, SPOKE_FROM]] = -1
    for place, field in ((OWN_TIMEOUT, LIMIT_FIELDS[0]), (OWN_GRACE, LIMIT_FIELDS[1])):
        rows[:, place] = pc.fill_null(registered[field.name], NONE).to_numpy()
    assert shards.least_frontier_ms is not None, "`validated_devices` has checked the frontier"
    judging = FoldCall(devices, Advance.between(shards, shards, 0), policies)
    at = judging.shards_of_devices()
    rows[:, QUIET_COVERED] = _covered(shards, at, since_ms)
    judging.advance_time(np.array(shards.frontiers_ms)[at], shards.least_frontier_ms)
    devices.drop_absent()
    return KeyGroup(shards, policies, devices)


def _covered(shards: Shards, numbers: Int64s, instants_ms: Int64s) -> Int64s:
    """Return the covered time of each device's shard at the instant of the device."""
    found = np.empty(len(instants_ms), np.int64)
    for number, listening in enumerate(shards.listenings):
        is_of_shard = numbers == number
        distinct, places = np.unique(instants_ms[is_of_shard], return_inverse=True)
        covered = [listening.coverage.covered(instant_ms) for instant_ms in distinct.tolist()]
        found[is_of_shard] = np.array(covered, np.int64)[places]
    return found


def _empty_as_null(names: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return words with null for the empty word, which `core.fold` treats as absent."""
    return pc.if_else(pc.equal(names, ""), None, names)


def _dictionary(column: pa.ChunkedArray) -> pa.DictionaryArray:
    return column.combine_chunks().dictionary_encode()
