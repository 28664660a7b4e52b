"""Judgements: the output rows of the fold."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.rows import Row, Trust
from fleetpulse.core.times import format_duration


class JudgementKind(StrEnum):
    """Kinds of judgements; the table `judgements` is partitioned by them."""

    TRANSITION = "transition"  # a device changed its mode
    LATE = "late"  # a message was received after its event time had been judged
    CLOCK = "clock"  # a device's clock fault starts: from this signal on, its signals count at ``received_at``
    IDENTITY_CONFLICT = "identity_conflict"  # signals of one id come from two sites in turn; at most one a day and device
    DUPLICATE = "duplicate"  # a copy of a message; emitted when the instant of the message is judged
    AFTER_DECOMMISSION = "after_decommission"  # a signal of a device out of service
    UNKNOWN_DEVICE = "unknown_device"  # a signal of a device that is not registered, or was forgotten since
    REFUSED = "refused"  # a command, registry or policy row that cannot take effect
    SUMMARY = "summary"  # number of devices in each mode, for one key group
    RETRACT = "retract"  # a transition that did not happen, according to late messages
    ADD = "add"  # a transition that did happen, according to late messages


REASONS: Final[Mapping[JudgementKind, str]] = MappingProxyType(
    {
        JudgementKind.DUPLICATE: "the copy received first counts",
        JudgementKind.AFTER_DECOMMISSION: "the device is out of service",
        JudgementKind.UNKNOWN_DEVICE: "the device is not registered, or was forgotten; register it (again)",
        JudgementKind.RETRACT: "retracted because of late messages",
    }
)
SUMMED: Final = {  # kinds that each message of a device can cause; noun in the reason of a row that counts several
    JudgementKind.LATE: "late messages",
    JudgementKind.DUPLICATE: "copies",
    JudgementKind.CLOCK: "clock faults",
    JudgementKind.AFTER_DECOMMISSION: "signals",
    JudgementKind.UNKNOWN_DEVICE: "signals",
}
NEWEST: Final = 5  # newest judgements of such a kind, device and minute that a batch lists in a row each
CORRECTED_ENTRY: Final = "retracted because of a corrected registry entry"  # reason of a retraction without late messages
AMENDMENTS: Final = (JudgementKind.RETRACT, JudgementKind.ADD)
CHANGES: Final = (JudgementKind.TRANSITION, *AMENDMENTS)  # kinds that change the mode of a device
LISTED: Final = (  # judgements of messages beside transitions
    JudgementKind.LATE,
    JudgementKind.CLOCK,
    JudgementKind.IDENTITY_CONFLICT,
    JudgementKind.DUPLICATE,
    JudgementKind.AFTER_DECOMMISSION,
    JudgementKind.UNKNOWN_DEVICE,
    JudgementKind.REFUSED,
)


def clock_fault(trust: Trust, offset_ms: int | None) -> str:
    """Return the reason of a clock fault, for people.

    Args:
        trust: class of the event time, one of `presence_time.FAULTS`.
        offset_ms: event time less ``received_at``, milliseconds; None if the event time is invalid.
    """
    if offset_ms is None:
        return "ts is not a time"
    if trust is Trust.AHEAD:
        return f"clock ahead by {format_duration(offset_ms)}"
    return f"clock behind by {format_duration(-offset_ms)}: not set, or set back"


def identity_conflict(site: str, other: str) -> str:
    """Return the reason of an identity conflict, for people.

    Args:
        site: site of the newest signals, and of those before the signals from ``other``.
        other: site of the signals in between.
    """
    return f'one id sends from "{other}" and "{site}" in turn (two devices, or one that moves); give one of them another id'


def clock_behind(lead_ms: int) -> str:
    """Return the reason of a late message, for people.

    Args:
        lead_ms: event time less ``received_at``, milliseconds.
    """
    return f"clock behind by {format_duration(-lead_ms)}, or delayed in transit"


@dataclass(frozen=True, slots=True)
class Judgement:
    """One judgement: times are epoch milliseconds, values that do not apply are None.

    `core.tables` describes the columns.
    """

    kind: JudgementKind
    device_id: str
    site: str | None = None
    event_time_ms: int | None = None
    device_class: str | None = None
    life_ms: int | None = None
    transition_no: int | None = None
    from_mode: Mode | None = None
    to_mode: Mode | None = None
    trigger: Trigger | None = None
    last_seen_ms: int | None = None
    runtime_ms: int | None = None
    last_errors: tuple[str, ...] = ()
    gateway: str | None = None
    policy_version: str | None = None
    received_at_ms: int | None = None
    message_kind: str | None = None
    boot: str | None = None
    seq: int | None = None
    reason: str | None = None
    late_by_ms: int | None = None
    key_group: int | None = None
    counts: str | None = None
    amendment_no: int | None = None
    takes_back: int | None = None
    messages: int | None = None
    event_time_until_ms: int | None = None
    received_until_ms: int | None = None


MAX_REASON: Final = 1_000  # characters


def message_judgement(row: Row, kind: JudgementKind, reason: str = "", late_by_ms: int | None = None) -> Judgement:
    """Return a judgement about a message.

    A reason may quote the message: it is truncated, and characters that UTF-8 cannot encode are
    escaped.

    Args:
        row: the message.
        kind: kind of the judgement.
        reason: reason for people; empty: the constant one of `REASONS`.
        late_by_ms: distance of the event time from the frontier, milliseconds; None unless late.
    """
    return Judgement(
        kind,
        row.device_id,
        site=row.site,
        event_time_ms=row.event_time_ms,
        gateway=row.gateway,
        received_at_ms=row.received_at_ms,
        message_kind=row.kind.value,
        boot=row.boot,
        seq=row.seq,
        reason=reason[:MAX_REASON].encode(errors="backslashreplace").decode() or REASONS[kind],
        late_by_ms=late_by_ms,
    )


COMPARED: Final = ("kind", "device_id", "event_time_ms", "life_ms", "transition_no", "from_mode", "to_mode", "trigger",
                   "runtime_ms", "last_seen_ms", "last_errors", "policy_version", "device_class", "site", "gateway",
                   "received_at_ms", "message_kind", "boot", "seq", "reason", "late_by_ms")  # fmt: skip
_NOT_COMPARED: Final = (
    "key_group",
    "counts",
    "amendment_no",
    "takes_back",  # of summaries and amendments
    "messages",
    "event_time_until_ms",
    "received_until_ms",
)  # of rows for several messages
assert {*COMPARED, *_NOT_COMPARED} == {field.name for field in fields(Judgement)}, "each field is compared or excluded"


def compared(judgements: Iterable[Judgement]) -> Counter[tuple[Any, ...]]:
    """Return a bag of judgement values in the order of `COMPARED`, without summaries."""
    values = (tuple(getattr(one, name) for name in COMPARED) for one in judgements if one.kind is not JudgementKind.SUMMARY)
    return Counter(values)
