"""A key group: the devices that share a place in the state, what waits for its time, and what is known of us.

Rule 1: ``fold`` takes rows in the order of ``received_at`` between calls, in any order within one.
Rule 2: what comes out depends on the rows and on how far ``received_at`` has come; never on how calls were cut.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleetpulse.columnar.blocks import (
    STORED_VERSION,
    batch_to_devices,
    batch_to_rows,
    devices_to_batch,
    from_bytes,
    rows_to_batch,
    to_bytes,
)
from fleetpulse.core.coverage import Coverage, Listening
from fleetpulse.core.device import Device, Fold, World, next_due
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import Judgement, Verdict
from fleetpulse.core.messages import Row, identity, order
from fleetpulse.core.policy import Dated, Policies, from_normalised
from fleetpulse.core.replay import Deployment, Intake, Waiting, arrival, wait


@dataclass(slots=True)
class KeyGroup:
    """The state of one key group.

    Attributes:
        listening: coverage and frontier.
        policies: those known.
        devices: by id.
        waiting: by device id: rows whose time has not come.
        counts: devices by mode and waiting rows, as last said in a summary.
        due_ms: the ``received_at`` at which something will be due; None where nothing will.
    """

    listening: Listening
    policies: Policies = field(default_factory=Policies)
    devices: dict[str, Device] = field(default_factory=dict[str, Device])
    waiting: dict[str, Waiting] = field(default_factory=dict[str, Waiting])
    counts: str = "{}"
    due_ms: int | None = None

    def fold(self, rows: Sequence[Row], newest_ms: int, deployment: Deployment) -> list[Judgement]:
        """Take in rows, then judge all that lies at or before the frontier.

        Args:
            rows: the group's rows of one micro-batch.
            newest_ms: up to where every row has been read, by ``received_at``.
            deployment: lateness and clock lead.

        Returns:
            Judgements, each device's in order.
        """
        intake = Intake(deployment, self.listening, self.policies, [])
        touched: set[str] = set()
        for row in sorted(rows, key=arrival):
            if intake.read(row):
                touched.add(row.device_id)
                copy = wait(self.waiting.setdefault(row.device_id, {}), row)
                if copy:
                    intake.judgements.append(copy)
        assert intake.listening is not None, "a key group begins with a row"
        self.listening = intake.listening.read(newest_ms, deployment.allowed_lateness_ms)
        self.policies = intake.policies
        frontier_ms = self.listening.frontier_ms
        if frontier_ms is not None:
            self._judge(frontier_ms, intake.judgements)
            self.listening, self.policies = self.listening.pruned(), self.policies.pruned(frontier_ms)
        self.due_ms = self._next_due(deployment)
        return intake.judgements

    def _judge(self, frontier_ms: int, judgements: list[Judgement]) -> None:
        fold = Fold(World(self.listening.coverage, self.policies), judgements)
        for device_id in list(self.devices.keys() | self.waiting.keys()):
            due = self._take_due(device_id, frontier_ms)
            device = fold.run(self.devices.get(device_id), due, frontier_ms)
            if device is None:
                self.devices.pop(device_id, None)
            else:
                self.devices[device_id] = device

    def _take_due(self, device_id: str, frontier_ms: int) -> list[Row]:
        waiting = self.waiting.get(device_id)
        if not waiting:
            return []
        ordered = sorted(waiting.values(), key=order)
        due = [row for row in ordered if order(row)[0] <= frontier_ms]
        for row in due:
            del waiting[identity(row)]
        if not waiting:
            del self.waiting[device_id]
        return due

    def _next_due(self, deployment: Deployment) -> int | None:
        """Return the earliest ``received_at`` at which a waiting row or a deadline will be judged."""
        world = World(self.listening.coverage, self.policies)
        instants = [order(row)[0] for waiting in self.waiting.values() for row in waiting.values()]
        for device in self.devices.values():
            due = next_due(device, world)
            if due is not None:
                instants.append(due[0])
        return self.listening.due_at(min(instants), deployment.allowed_lateness_ms) if instants else None

    def summary(self, key_group: int) -> Judgement | None:
        """Say how many devices are in which mode, where that has changed since it was last said."""
        modes = Counter(device.mode.value for device in self.devices.values())
        counts = json.dumps({mode: modes[mode] for mode in sorted(modes)})
        if counts == self.counts:
            return None
        self.counts = counts
        at_ms = self.listening.frontier_ms
        return Judgement(Verdict.SUMMARY, "_", event_time_ms=at_ms, key_group=key_group, counts=counts)

    def to_stored(self) -> tuple[bytes, bytes | None]:
        """Return the stored form: the devices with what is known of us, and the waiting rows (None without any)."""
        known: dict[str, Any] = {
            "version": STORED_VERSION,
            "start_ms": self.listening.coverage.start_ms,
            "base_ms": self.listening.coverage.base_ms,
            "gaps": self.listening.coverage.gaps,
            "newest_ms": self.listening.newest_ms,
            "frontier_ms": self.listening.frontier_ms,
            "policies": [_dated_to_plain(dated) for dated in self.policies.dated],
            "counts": self.counts,
            "due_ms": self.due_ms,
        }
        block = to_bytes(devices_to_batch(self.devices.values()), known)
        rows = [row for waiting in self.waiting.values() for row in waiting.values()]
        return block, to_bytes(rows_to_batch(rows)) if rows else None

    @classmethod
    def from_stored(cls, block: bytes, waiting: bytes | None) -> "KeyGroup":
        """Read the stored form.

        Raises:
            FleetError: it was written by a version that this one does not know.
        """
        batch, known = from_bytes(block)
        if known.get("version") != STORED_VERSION:
            raise FleetError(
                f"state of stored form {known.get('version')} cannot be read by this version, which reads "
                f"{STORED_VERSION}; run the fleetpulse that wrote it, or begin with an empty home"
            )
        coverage = Coverage(known["start_ms"], known["base_ms"], tuple((gap[0], gap[1]) for gap in known["gaps"]))
        return cls(
            Listening(coverage, known["newest_ms"], known["frontier_ms"]),
            Policies(tuple(_dated_from_plain(plain) for plain in known["policies"])),
            {device.device_id: device for device in batch_to_devices(batch)},
            _by_device(batch_to_rows(from_bytes(waiting)[0])) if waiting else {},
            known["counts"],
            known["due_ms"],
        )


def begin(received_at_ms: int) -> KeyGroup:
    """Return an empty key group of a history whose first row was received at ``received_at_ms``."""
    return KeyGroup(Listening.begin(received_at_ms))


def _by_device(rows: Iterable[Row]) -> dict[str, Waiting]:
    waiting: dict[str, Waiting] = {}
    for row in rows:
        waiting.setdefault(row.device_id, {})[identity(row)] = row
    return waiting


def _dated_to_plain(dated: Dated) -> dict[str, Any]:
    return {
        "effective_from_ms": dated.effective_from_ms,
        "received_at_ms": dated.received_at_ms,
        "version": dated.version,
        "policy": dated.policy.normalised(),
    }


def _dated_from_plain(plain: dict[str, Any]) -> Dated:
    return replace(Dated(**plain), policy=from_normalised(plain["policy"]))
