"""Connection sessions of devices: the definition, as a pure function of the rows received.

Rule 1: the order is that of arrival: `received_at`, then the position in delivery. Event times have no effect, so
there are no late rows.
Rule 2: a session begins with a birth, or with another signal if none is open. It ends with a will, a clean
disconnect, the birth of another session, or by silence: covered time without a signal above the limit.
Rule 3: a session has the site that its newest signal names. Any other name is the first one that a signal of the
session gives: its session, boot, firmware and gateway.
Rule 4: the next signal or will of a device decides whether it was silent for longer than the limit. Without one, the
end is written once the covered time exceeds the limit by `SETTLED_MS`: a gap row of another bridge may arrive later
than the rows of the time that it excludes.

`columnar.streams.sessions` computes the same over the blocks of a key group.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from fleetpulse.core.policy import Policies
from fleetpulse.core.presence.coverage import Coverage
from fleetpulse.core.presence.sending_order import fell_back
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import Deployment, LatenessFilter
from fleetpulse.core.rows import FROM_DEVICES, RANK, Clock, Kind, Row, distinguishing_digest

CLEAN: Final = frozenset({"disconnect", "logout"})  # codes of a death that the device, or a mapping, reports itself
SETTLED_MS: Final = 60_000  # see rule 4
SNAPSHOT_MS: Final = 3_600_000  # span of ``received_at`` between two snapshots of the open sessions


class StartedBy(StrEnum):
    """Message that began a session."""

    BIRTH = "birth"  # the device reported that it connected
    SIGNAL = "signal"  # any other signal, while no session was open


class EndedBy(StrEnum):
    """Reason for which a session ended."""

    WILL = "will"  # the broker lost the connection
    DISCONNECT = "disconnect"  # the device disconnected, or logged out
    BIRTH = "birth"  # the device began another session
    SILENCE = "silence"  # no signal for more than the limit of covered time


@dataclass(frozen=True, slots=True)
class Session:
    """One connection of a device. Instants are epoch milliseconds.

    Attributes:
        device_id: id of the device.
        site: site in the topic of its newest signal.
        gateway: gateway that delivered its signals.
        session: name of the connection.
        boot: boot of the device.
        firmware: firmware version.
        started_at_ms: ``received_at`` of its first message.
        position: position in delivery of its first message; with device and start, it identifies the session.
        started_by: message that began it.
        seq: counter of its first message; None if it has none.
        digest: digest of its first message if that has a timestamp and no counter; otherwise 0.
        last_seen_ms: ``received_at`` of its newest signal.
        messages: number of its signals, copies included.
        ended_at_ms: instant of its end; None while it is open.
        ended_by: reason of its end.
    """

    device_id: str
    site: str
    gateway: str | None
    session: str | None
    boot: str | None
    firmware: str | None
    started_at_ms: int
    position: int
    started_by: StartedBy
    seq: int | None
    digest: int
    last_seen_ms: int
    messages: int = 1
    ended_at_ms: int | None = None
    ended_by: EndedBy | None = None


def begin(row: Row) -> Session:
    """Return the session that a signal begins."""
    return Session(
        row.device_id,
        row.site,
        row.gateway,
        row.session,
        row.boot,
        row.firmware,
        row.received_at_ms,
        row.position,
        StartedBy.BIRTH if row.kind is Kind.BIRTH else StartedBy.SIGNAL,
        row.seq,
        _stamped_digest(row),
        row.received_at_ms,
    )


def after(
    session: Session | None, row: Row, silence_ms: int, coverage_of: Callable[[str], Coverage]
) -> tuple[Session | None, list[Session]]:
    """Apply a signal or will of a device to its open session.

    Args:
        session: open session of the device; None without one.
        row: the next row of the device in the order of arrival.
        silence_ms: limit of silence, milliseconds.
        coverage_of: function from a site to its coverage by the gap rows before ``row``.

    Returns:
        The open session afterwards, and the sessions to write: those that ended, then the one that began.
    """
    if session is not None and _was_silent(session, row.received_at_ms, silence_ms, coverage_of):
        now_open, changed = after(None, row, silence_ms, coverage_of)
        return now_open, [ended(session, session.last_seen_ms, EndedBy.SILENCE), *changed]
    if row.kind is Kind.DEATH:
        if session is None or not _is_of(session, row):
            return session, []
        reason = EndedBy.DISCONNECT if row.code in CLEAN else EndedBy.WILL
        return None, [ended(session, row.received_at_ms, reason)]
    if session is None:
        return (begun := begin(row)), [begun]
    if row.kind is Kind.BIRTH and _begins_another(session, row):
        return (begun := begin(row)), [ended(session, row.received_at_ms, EndedBy.BIRTH), begun]
    return _continued(session, row), []


def _was_silent(session: Session, at_ms: int, silence_ms: int, coverage_of: Callable[[str], Coverage]) -> bool:
    if at_ms - session.last_seen_ms <= silence_ms:
        return False
    coverage = coverage_of(session.site)
    return coverage.covered(at_ms) - coverage.covered(session.last_seen_ms) > silence_ms


def ended(session: Session, at_ms: int, reason: EndedBy) -> Session:
    """Return a session with its end."""
    return replace(session, ended_at_ms=at_ms, ended_by=reason)


def _continued(session: Session, row: Row) -> Session:
    return replace(
        session,
        site=row.site,
        gateway=row.gateway if session.gateway is None else session.gateway,
        session=row.session if session.session is None else session.session,
        boot=row.boot if session.boot is None else session.boot,
        firmware=row.firmware if session.firmware is None else session.firmware,
        last_seen_ms=row.received_at_ms,
        messages=session.messages + 1,
    )


def _is_of(session: Session, will: Row) -> bool:
    """Whether a will is of a session; if either names no session, the boot decides."""
    if will.session is not None and session.session is not None:
        return will.session == session.session
    return will.boot is None or session.boot is None or will.boot == session.boot


def _begins_another(session: Session, birth: Row) -> bool:
    """Whether a birth begins another session.

    It does not if it names the same session, is a copy of the birth that began it, or was sent before that birth:
    a broker may deliver an older birth again.
    """
    is_one_boot = birth.boot is not None and birth.boot == session.boot
    if is_one_boot and birth.seq is not None and session.seq is not None and fell_back(session.seq, birth.seq):
        return False
    if birth.session is not None and session.session is not None:
        return birth.session != session.session
    if session.started_by is not StartedBy.BIRTH or birth.boot != session.boot or birth.seq != session.seq:
        return True
    return birth.seq is None and (session.digest == 0 or _stamped_digest(birth) != session.digest)


def _stamped_digest(row: Row) -> int:
    """Return the digest of a message that its timestamp distinguishes; 0 for one with a counter, or without both."""
    return 0 if row.clock is Clock.RECEIVED else distinguishing_digest(row)


def is_snapshot_due(before_ms: int, newest_ms: int) -> bool:
    """Return whether a snapshot of the open sessions follows a batch.

    Args:
        before_ms: newest ``received_at`` before the batch, epoch milliseconds.
        newest_ms: newest ``received_at`` of the batch, epoch milliseconds.
    """
    return newest_ms // SNAPSHOT_MS > before_ms // SNAPSHOT_MS


def settled_after_ms(silence_ms: int) -> int:
    """Return the covered time after its newest signal at which a session has ended, see rule 4."""
    return silence_ms + SETTLED_MS + 1


def with_gap(shards: Shards | None, row: Row, silence_ms: int) -> Shards:
    """Return coverage and frontiers after a gap row; the settled time is the allowed lateness of their frontiers.

    Args:
        shards: coverage and frontiers before it; None before the first row.
        row: the gap row.
        silence_ms: limit of silence, milliseconds.
    """
    intake = LatenessFilter(Deployment(settled_after_ms(silence_ms)), shards, Policies(), [])
    intake.read(row)
    assert intake.shards is not None, "a row begins the coverage"
    return intake.shards


def arrival_order(row: Row) -> tuple[int, bool, int, str, int, int, str, str]:
    """Return the sort key of arrival; rows of two bridges at one instant and position have a fixed order."""
    seq = -1 if row.seq is None else row.seq
    return (
        row.received_at_ms,
        row.kind is not Kind.GAP,
        row.position,
        row.site,
        RANK[row.kind],
        seq,
        row.session or "",
        row.boot or "",
    )


def sessions(rows: Iterable[Row], silence_ms: int) -> Iterator[Session]:
    """Yield the rows of the table ``sessions`` that follow from bronze: one at each start, one at each end.

    Args:
        rows: rows of bronze in any order.
        silence_ms: limit of silence, milliseconds.
    """
    shards: Shards | None = None
    open_sessions: dict[str, Session] = {}
    for row in sorted(rows, key=arrival_order):
        if row.kind is Kind.GAP:
            shards = with_gap(shards, row, silence_ms)
        shards = (shards or Shards.begin(row.received_at_ms)).read(row.received_at_ms, settled_after_ms(silence_ms))
        for session in [*open_sessions.values()]:
            frontier_ms = shards.of(session.site).frontier_ms
            if frontier_ms is not None and session.last_seen_ms <= frontier_ms:
                yield ended(open_sessions.pop(session.device_id), session.last_seen_ms, EndedBy.SILENCE)
        if row.kind in FROM_DEVICES:
            session, changed = after(
                open_sessions.pop(row.device_id, None), row, silence_ms, lambda site, known=shards: known.of(site).coverage
            )
            yield from changed
            if session is not None:
                open_sessions[row.device_id] = session
