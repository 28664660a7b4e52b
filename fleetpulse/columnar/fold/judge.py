"""Judging of due rows and deadlines, by the compiled fold or by the definition.

Rule: `core.fold`, the definition, processes a device if registry, control or correction rows of it
are due. It also does so if due rows or gateway events of another shard, or from before the device's
latest fact, concern it. The compiled fold processes all other devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.codec.arrow import KINDS, NO_SIGNALS, batch_to_signals
from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.fold.judgement_batches import judgements_to_batch, rejections, transitions_to_batch
from fleetpulse.columnar.fold.ordering import arrivals, in_order
from fleetpulse.columnar.jit import kernel, layout
from fleetpulse.columnar.jit.context import NEVER, NONE, Int64s, PackedContext, packed_context
from fleetpulse.columnar.jit.layout import TRUSTS
from fleetpulse.columnar.jit.string_index import KNOWN, NOTHING, OTHER, compare, places_of, text_of
from fleetpulse.columnar.state.devices import Devices
from fleetpulse.core.device import EvaluationContext
from fleetpulse.core.fold import NO_CODE, Fold
from fleetpulse.core.judgements import REASONS, JudgementKind, clock_fault, identity_conflict
from fleetpulse.core.policy import Policies
from fleetpulse.core.presence.shards import Advance
from fleetpulse.core.replay import run_due
from fleetpulse.core.rows import GatewayEvent, Kind, Row, Trust, session_number

_OUTPUT_ROWS: Final = 16_384
_ERROR: Final = KINDS.index(Kind.ERROR)
_LATE: Final = TRUSTS.index(Trust.LATE)
_NOTES: Final = {
    layout.AFTER_DECOMMISSION: JudgementKind.AFTER_DECOMMISSION,
    layout.UNKNOWN_DEVICE: JudgementKind.UNKNOWN_DEVICE,
    layout.CLOCK_FAULT: JudgementKind.CLOCK,
    layout.IDENTITY_CONFLICT: JudgementKind.IDENTITY_CONFLICT,
}


def _arrival(row: Row) -> int:
    return row.arrival


def _direct(signals: pa.RecordBatch) -> NDArray[np.bool_]:
    """Return a mask of the signals that no gateway delivered, as `Row.is_direct`."""
    gateways = signals["gateway"]
    if gateways.null_count == len(gateways):
        return np.ones(len(gateways), bool)
    own = pc.equal(gateways.cast(pa.string()), signals["device_id"])
    return pc.fill_null(own, fill_value=True).to_numpy(zero_copy_only=False)


def _sessions(signals: pa.RecordBatch) -> Int64s:
    """Return the number of each signal's session; `NONE` if it names none."""
    sessions = signals["session"]
    if sessions.null_count == len(sessions):
        return np.full(len(sessions), NONE)
    encoded = sessions.dictionary_encode()
    numbers = np.array([*map(session_number, encoded.dictionary.to_pylist()), NONE], np.int64)
    return numbers[encoded.indices.fill_null(len(numbers) - 1).to_numpy()]


def _faults(signals: pa.RecordBatch) -> list[str]:
    """Return the reason of each signal's clock fault."""
    trusts = [TRUSTS[number] for number in signals["trust"].to_pylist()]
    clocks = zip(trusts, signals["offset_ms"].to_pylist(), strict=True)
    return [clock_fault(trust, None if trust is Trust.INVALID else offset_ms) for trust, offset_ms in clocks]


def _merged(rows: layout.Matrix, order: Int64s, events: layout.Matrix) -> tuple[layout.Matrix, Int64s]:
    """Merge gateway events into messages of devices, as `core.replay.with_gateways`.

    Args:
        rows: messages, in the order in which they are judged.
        order: index of each message among the signals.
        events: gateway events, see `FoldCall._gateway_events`.

    Returns:
        Messages and events, and the index of each among the signals: -1 for events.
    """
    whole = np.concatenate([rows, events])
    by = np.lexsort((whole[:, layout.R_AT], whole[:, layout.R_DEVICE]))  # stable: at equal instants, messages come first
    return whole[by], np.concatenate([order, np.full(len(events), -1)])[by]


@dataclass(frozen=True, slots=True)
class DueRows:
    """Rows of a shard, for one fold call.

    Attributes:
        shard: number of the shard.
        signals: columns of `SIGNAL_SCHEMA`, in any order, possibly with copies.
        due: mask of the signals that are due.
        others: due registry, control and correction rows, and due gateway events for everyone (see
            `core.rows.for_everyone`).
    """

    shard: int
    signals: pa.RecordBatch
    due: NDArray[np.bool_]
    others: Sequence[Row]


class FoldCall:
    """Judging of due rows and deadlines in one fold call.

    Args:
        devices: devices of the key group; changed in place.
        advance: coverage and the advance of the frontiers.
        policies: policies that may be in force.
    """

    def __init__(self, devices: Devices, advance: Advance, policies: Policies) -> None:
        self.batches: list[pa.RecordBatch] = []  # columns of `JUDGEMENT_SCHEMA`
        self._devices, self._advance, self._policies = devices, advance, policies
        self._buffer = np.empty((0, layout.OUT_WIDTH), np.int64)
        self._noted: list[layout.Matrix] = []  # output rows of the kernel; their batches are built once, at the end
        self._signals = NO_SIGNALS  # signals that the output rows refer to

    def _arrays(self, shard: int) -> PackedContext:
        devices, coverage = self._devices, self._advance.shards.listenings[shard].coverage
        return packed_context(coverage, self._policies, devices.classes.words, devices.codes, devices.sequences)

    def shards_of_devices(self) -> Int64s:
        """Return the shard number of each device's current site; -1 without state."""
        rows, shards = self._devices.rows, self._advance.shards
        if len(shards) == 1:
            return np.where(rows[:, layout.MODE] == layout.ABSENT, -1, 0)
        numbers = np.array([*map(shards.number, self._devices.sites.words), -1], np.int64)
        sites = np.where(rows[:, layout.SPEAKS_FROM] >= 0, rows[:, layout.SPEAKS_FROM], rows[:, layout.SITE])
        return np.where(rows[:, layout.MODE] == layout.ABSENT, -1, numbers[np.maximum(sites, -1)])

    def apply_rows(self, parts: Sequence[DueRows]) -> None:
        """Judge due rows, and fire the deadlines that lie between them."""
        signals = parts[0].signals if len(parts) == 1 else pa.concat_batches([part.signals for part in parts])
        due = np.concatenate([part.due for part in parts])
        shards = np.repeat([part.shard for part in parts], [part.signals.num_rows for part in parts])
        places = self._devices.locate(signals["device_id"], due)
        commands = [row for part in parts for row in part.others if not row.is_for_everyone]
        events = {part.shard: sorted((row for row in part.others if row.is_for_everyone), key=_arrival) for part in parts}
        by_definition = places[:0]
        if len(self._advance.shards) > 1:
            by_definition = np.union1d(self._across_shards(signals, places, shards), self._behind_events(events))
        if commands:
            ids = pa.array([row.device_id for row in commands], pa.string())
            by_definition = np.union1d(by_definition, self._devices.locate(ids, np.ones(len(ids), bool)))
        if len(by_definition):
            is_by_definition = np.isin(places, by_definition)
            definition_signals = signals.filter(pa.array(is_by_definition))
            self._by_definition(by_definition, [*batch_to_signals(definition_signals), *commands], events)
            places = np.where(is_by_definition, -1, places)
        for part in parts:
            shard_places = places if len(parts) == 1 else np.where(shards == part.shard, places, -1)
            of_devices = self.shards_of_devices() if len(parts) > 1 else places[:0]  # the previous part can add devices
            others = np.flatnonzero((of_devices != part.shard) & (of_devices >= 0))
            of_gateways = self._gateway_events(events[part.shard], signals, shard_places, np.union1d(by_definition, others))
            if len(of_gateways) or (shard_places >= 0).any():
                self._by_kernel(signals, shard_places, of_gateways, part.shard)

    def _across_shards(self, signals: pa.RecordBatch, places: Int64s, shards: Int64s) -> Int64s:
        """Find devices with rows of another shard, or rows before their latest fact.

        Args:
            signals: columns of `SIGNAL_SCHEMA`.
            places: index of each signal's device; -1 if the signal is not due.
            shards: shard number of each signal.
        """
        due = places >= 0
        if not due.any():
            return places[:0]
        of_devices = self.shards_of_devices()
        if (new := due & (of_devices[places] < 0)).any():  # a new device is in the shard of its first row
            of_devices[places[new][::-1]] = shards[new][::-1]
        behind = signals["presence_ms"].to_numpy() < self._last_fact_ms()[places]
        return np.unique(places[due & ((of_devices[places] != shards) | behind)])

    def _behind_events(self, events: Mapping[int, Sequence[Row]]) -> Int64s:
        """Find devices behind a gateway with an event before their `Device.last_fact_ms`."""
        rows = [row for of_shard in events.values() for row in of_shard]
        if not rows:
            return np.empty(0, np.int64)
        gateways = [self._devices.gateways.number(row.gateway) for row in rows]
        concerned = np.isin(self._devices.rows[:, layout.GATEWAY], gateways)
        return np.flatnonzero(concerned & (self._last_fact_ms() > min(row.at_ms for row in rows)))

    def _last_fact_ms(self) -> Int64s:
        """Return `Device.last_fact_ms` of each device."""
        facts = [layout.QUIET_SINCE, layout.MODE_SINCE, layout.CLASS_SINCE, layout.DEATH, layout.OUTAGE]
        return self._devices.rows[:, facts].max(axis=1, initial=NONE)

    def _gateway_events(self, events: Sequence[Row], signals: pa.RecordBatch, places: Int64s, excluded: Int64s) -> layout.Matrix:
        """Return one row for each pair of gateway event and concerned device.

        A device is concerned if it is behind the gateway, or if one of its signals names the
        gateway.

        Args:
            events: gateway events for everyone (see `core.rows.for_everyone`), in arrival order.
            signals: columns of `SIGNAL_SCHEMA`.
            places: index of each signal's device; -1 for none.
            excluded: indices of the devices to exclude.

        Returns:
            Rows of `layout.ROW_FIELDS`, in arrival order of the events.
        """
        devices = self._devices
        if not events or not len(devices):
            return np.empty((0, len(layout.ROW_FIELDS)), np.int64)
        of_signals = devices.gateways.numbers(signals["gateway"])
        gateways = [devices.gateways.number(row.gateway) for row in events]
        own = places_of(text_of(pa.array([row.gateway for row in events])), np.ones(len(events), bool), text_of(devices.ids))
        behind = devices.rows[:, layout.GATEWAY]
        known, named = np.flatnonzero(np.isin(behind, gateways)), np.isin(of_signals, gateways) & (places >= 0)
        pairs = np.concatenate([np.stack([behind[known], known]), np.stack([of_signals[named], places[named]])], axis=1)
        pairs = np.unique(pairs, axis=1)  # gateway and device, by gateway
        pairs = pairs[:, ~np.isin(pairs[1], excluded)]
        found: list[layout.Matrix] = []
        for row, gateway, itself in zip(events, gateways, own.tolist(), strict=True):
            concerned = pairs[1, slice(*np.searchsorted(pairs[0], [gateway, gateway + 1]))]
            concerned = concerned[concerned != itself]
            added = np.zeros((len(concerned), len(layout.ROW_FIELDS)), np.int64)
            added[:, layout.R_DEVICE], added[:, layout.R_AT], added[:, layout.R_ARRIVAL] = concerned, row.at_ms, row.arrival
            returns = row.gateway_event is GatewayEvent.RETURN
            added[:, layout.R_KIND] = layout.GATEWAY_RETURN if returns else layout.GATEWAY_DEATH
            added[:, layout.R_GATEWAY] = gateway
            found.append(added)
        return np.concatenate(found)

    def _by_definition(self, places: Int64s, rows: Sequence[Row], events: Mapping[int, Sequence[Row]]) -> None:
        by_device: dict[str, list[Row]] = {one: [] for one in self._devices.ids.take(pa.array(places)).to_pylist()}
        for row in rows:
            by_device[row.device_id].append(row)
        of_gateways = {(row.gateway, row.arrival): row for of_shard in events.values() for row in of_shard}.values()
        fold = Fold(EvaluationContext(self._advance.shards, self._policies))
        boots: list[str | None] = []
        for place, due in zip(places.tolist(), by_device.values(), strict=True):
            device = run_due(fold, self._devices.get(place), due, of_gateways, self._advance)
            self._devices.put(place, device)
            boots.append(device.boot if device else None)
        self._devices.set_boots(places, pa.array(boots, pa.string()))
        self.batches.append(judgements_to_batch(fold.judgements))

    def _by_kernel(self, signals: pa.RecordBatch, places: Int64s, events: layout.Matrix, shard: int) -> None:
        """Judge signals and gateway events of a shard with the compiled fold.

        Args:
            signals: columns of `SIGNAL_SCHEMA`.
            places: index of each signal's device; signals with -1 are skipped.
            events: rows of `_gateway_events`.
            shard: number of the shard.
        """
        devices = self._devices
        order, copies = in_order(signals, places)
        copies = copies[signals["trust"].to_numpy()[copies] != _LATE]  # late copies are listed already
        if len(copies):
            self.batches.append(
                rejections(signals.take(pa.array(copies)), JudgementKind.DUPLICATE, [REASONS[JudgementKind.DUPLICATE]])
            )
        kinds = signals["kind"].to_numpy()
        is_remembered = kinds == _ERROR
        for kind in self._velocity_kinds():
            is_remembered |= kinds == kind
        devices.remember(places[is_remembered & (places >= 0)])
        boots, boot_names = self._boots(signals, places)
        rows = kernel.matrix(
            order,
            places,
            signals["presence_ms"].to_numpy(),
            signals["offset_ms"].to_numpy(),
            arrivals(signals),
            signals["trust"].to_numpy(),
            _direct(signals),
            kinds,
            boots,
            _sessions(signals),
            signals["seq"].to_numpy(),
            *devices.codes.mapped(signals["code"], NO_CODE),
            *devices.gateways.mapped(signals["gateway"]),
            *devices.sites.mapped(signals["site"]),
            *devices.firmwares.mapped(signals["firmware"]),
        )
        if len(events):
            rows, order = _merged(rows, order, events)
        context, first = self._arrays(shard), 0
        before = devices.rows[:, layout.BOOT].copy()
        while first < len(rows):
            buffer = self._room(len(rows) - first)
            first, n_out = kernel.apply_rows(devices.rows, devices.memory, context, rows, first, buffer)
            self._note(buffer[:n_out], order)
        self._signals = signals
        after = devices.rows[:, layout.BOOT]
        changed = np.flatnonzero(after != before)
        if len(changed):
            numbers = after[changed]
            devices.set_boots(changed, boot_names.take(pa.array(numbers - OTHER, mask=numbers < 0)))

    def _velocity_kinds(self) -> set[int]:
        """Return the kinds of signals that velocity rules count."""
        policies = (one.policy for one in self._policies.dated)
        rules = (one for policy in policies for one in (policy.rules, *policy.classes.values()))
        return {KINDS.index(Kind(one.velocity_kind)) for one in rules if one.velocity_events is not None}

    def _boots(self, signals: pa.RecordBatch, places: Int64s) -> tuple[Int64s, pa.StringArray]:
        """Number the boots of signals relative to the boot of each signal's device.

        Returns:
            Number of each signal's boot: `NOTHING`, `KNOWN`, or `OTHER` plus an index into the
            second value.
        """
        devices, boots = self._devices, signals["boot"]
        known, numbers = text_of(devices.boots), np.full(len(places), NOTHING, np.int64)
        devices.rows[:, layout.BOOT] = np.where(known.present, KNOWN, NOTHING)
        compare(text_of(boots), places, known, numbers)
        others = np.flatnonzero(numbers == OTHER)
        encoded = boots.take(pa.array(others)).dictionary_encode()
        numbers[others] += encoded.indices.to_numpy()
        return numbers, encoded.dictionary

    def advance_time(self, through_ms: Int64s, settled_ms: int) -> list[int | None]:
        """Fire all deadlines up to each device's instant, and build the output batches.

        The batches contain the judgements of `apply_rows` too.

        Args:
            through_ms: instant of each device.
            settled_ms: instant up to which all shards are judged, see `core.signals.drop_settled_arrivals`.

        Returns:
            For each shard, the least distance from a device's instant to its next deadline; None if
            there is no deadline.
        """
        shards = range(len(self._advance.shards))
        if len(shards) == 1:
            left_ms = [self._pass_time(self._devices.rows, 0, through_ms, settled_ms, None)]
        else:
            left_ms = list[int]()
            of_devices = self.shards_of_devices()
            for shard in shards:
                shard_devices = np.flatnonzero(of_devices == shard)
                rows = self._devices.rows[shard_devices]
                left_ms.append(self._pass_time(rows, shard, through_ms[shard_devices], settled_ms, shard_devices))
                self._devices.rows[shard_devices] = rows
        self._build_batches()
        return [None if left == NEVER else left for left in left_ms]

    def _pass_time(self, rows: layout.Matrix, shard: int, through_ms: Int64s, settled_ms: int, places: Int64s | None) -> int:
        """Fire the deadlines of a shard's devices.

        Args:
            rows: rows of the devices, changed in place.
            shard: number of the shard.
            through_ms: instant of each device.
            settled_ms: instant up to which all shards are judged.
            places: indices of the devices in the key group; None if they are all devices.

        Returns:
            The least distance from a device's instant to its next deadline, or `NEVER`.
        """
        context, first, left_ms = self._arrays(shard), 0, NEVER
        while first < len(rows):
            buffer = self._room(len(rows) - first)
            first, n_out, left = kernel.advance_time(rows, self._devices.memory, context, through_ms, settled_ms, first, buffer)
            left_ms = min(left_ms, left)
            if places is not None:
                buffer[:n_out, layout.T_DEVICE] = places[buffer[:n_out, layout.T_DEVICE]]
            self._note(buffer[:n_out], None)
        return left_ms

    def _room(self, rows: int) -> layout.Matrix:
        size = min(_OUTPUT_ROWS, rows + layout.MAX_OUT_ROWS_PER_ROW)
        if len(self._buffer) < size:
            self._buffer = np.empty((size, layout.OUT_WIDTH), np.int64)
        return self._buffer

    def _note(self, out: layout.Matrix, order: Int64s | None) -> None:
        if not len(out):
            return
        out = out.copy()
        if order is not None:
            row = out[:, layout.T_ROW]
            row[:] = np.where(row >= 0, order[row], row)
        self._noted.append(out)

    def _build_batches(self) -> None:
        if not self._noted:
            return
        out, signals = np.concatenate(self._noted), self._signals
        kinds, row = out[:, layout.T_WHAT], out[:, layout.T_ROW]
        for note, verdict in _NOTES.items():
            noted = out[kinds == note]
            if not len(noted):
                continue
            listed = signals.take(pa.array(row[kinds == note]))
            if verdict is JudgementKind.CLOCK:
                reasons = _faults(listed)
            elif verdict is JudgementKind.IDENTITY_CONFLICT:
                others = [self._devices.sites.words[one] for one in noted[:, layout.T_SITE].tolist()]
                reasons = [*map(identity_conflict, listed["site"].to_pylist(), others)]
            else:
                reasons = [REASONS[verdict]]
            self.batches.append(rejections(listed, verdict, reasons))
        changes = out[kinds == layout.TRANSITION]
        if len(changes):
            self.batches.append(transitions_to_batch(changes, self._devices, self._policies, signals))
