"""Detection of deaths and returns of gateways, from messages in arrival order.

Rule 1: a will that names its own device as ``gateway`` is a gateway's death. A will of an older
session is not, since it was delivered late. If will or record has no session, the boots decide.
Rule 2: a gateway returns with the first signal after its death that voids a will
(docs/concepts/semantics.md). That is a signal that it delivered itself, a birth, or a signal that
another gateway delivered and that was sent after the death.
Rule 3: a signal that was sent before the first signal of the newest session, and that the broker
delivered again after it, does not change the session.
Rule 4: there is one record for each gateway that is dead, or whose session or boot is known.

Source: docs/adr/0033-gateways.md
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fleetpulse.core.presence.sending_order import Sent, precedes
from fleetpulse.core.rows import SIGNALS, Clock, GatewayEvent, Kind, Row


@dataclass(frozen=True, slots=True)
class Gateway:
    """Record of a gateway.

    Attributes:
        device_id: device id of the gateway.
        dead_since_ms: ``received_at`` of its death, epoch milliseconds; None while it is alive.
        session: session of its newest signal that was not late, or of a late birth.
        boot: boot of that signal.
        site: site of the signal that first named this session and boot.
        seq: counter of that signal.
        event_time_ms: event time of that signal, epoch milliseconds; None if it is invalid.
    """

    device_id: str
    dead_since_ms: int | None = None
    session: str | None = None
    boot: str | None = None
    site: str | None = None
    seq: int | None = None
    event_time_ms: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the record holds nothing."""
        return self.dead_since_ms is None and self.session is None and self.boot is None


@dataclass(slots=True)
class Gateways:
    """Records of gateways, kept up to date message by message.

    Attributes:
        allowed_lateness_ms: allowed lateness; signals that are later do not change the session.
        known: records by device id.
    """

    allowed_lateness_ms: int
    known: dict[str, Gateway] = field(default_factory=dict[str, Gateway])

    def read(self, row: Row) -> GatewayEvent | None:
        """Process the next message; return its event for the devices behind the gateway, if any."""
        before = self.known.get(row.device_id, Gateway(row.device_id))
        if row.kind is Kind.DEATH:
            if row.gateway != row.device_id or _is_of_older_session(before, row):
                return None
            self._keep(replace(before, dead_since_ms=row.received_at_ms))
            return GatewayEvent.DEATH
        if row.kind not in SIGNALS:
            return None
        returns = before.dead_since_ms is not None and _voids(row, before.dead_since_ms)
        after = replace(before, dead_since_ms=None) if returns else before
        is_gateway = row.gateway == row.device_id or not before.is_empty
        is_of_now = row.kind is Kind.BIRTH and row.is_direct  # even if its clock is wrong
        if is_gateway and (is_of_now or not self._is_late(row)):
            after = _with_names_of(row, after)
        if after != before:
            self._keep(after)
        return GatewayEvent.RETURN if returns else None

    def restore(self, gateways: Iterable[Gateway]) -> None:
        """Add records of an earlier run."""
        for one in gateways:
            self._keep(one)

    def _keep(self, gateway: Gateway) -> None:
        if gateway.is_empty:
            self.known.pop(gateway.device_id, None)
        else:
            self.known[gateway.device_id] = gateway

    def _is_late(self, row: Row) -> bool:
        return row.clock is Clock.DEVICE and _sent_ms(row) + self.allowed_lateness_ms <= row.received_at_ms


def _with_names_of(row: Row, gateway: Gateway) -> Gateway:
    """Return the record of a gateway with the session and boot that its signal names."""
    session, boot = row.session or gateway.session, row.boot or gateway.boot
    if (session, boot) == (gateway.session, gateway.boot):
        return gateway
    if precedes(row, Sent(gateway.boot, gateway.site or "", gateway.seq, gateway.event_time_ms)):
        return gateway  # the broker delivered the signal again, after signals of a newer session
    return replace(gateway, session=session, boot=boot, site=row.site, seq=row.seq, event_time_ms=row.event_time_ms)


def _is_of_older_session(gateway: Gateway, will: Row) -> bool:
    if will.session is not None and gateway.session is not None:
        return will.session != gateway.session
    return will.boot is not None and gateway.boot is not None and will.boot != gateway.boot


def _voids(row: Row, dead_since_ms: int) -> bool:
    return row.is_direct or row.kind is Kind.BIRTH or _sent_ms(row) > dead_since_ms


def _sent_ms(row: Row) -> int:
    return row.received_at_ms if row.event_time_ms is None else min(row.event_time_ms, row.received_at_ms)
