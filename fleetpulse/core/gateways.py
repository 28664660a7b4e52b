"""Deaths and returns of gateways: what landing tells the devices behind them, by rows in arrival order.

Rule 1: a will that names its own device as ``gateway`` is a gateway's death. One of another session (of another boot, where not
both name a session) than the gateway's newest is none: it was delivered late.
Rule 2: a gateway returns with the first signal after its death that voids a will, see docs/semantics.md: its own, its birth, or
one that another gateway delivered and that it sent after the death.
Rule 3: what is remembered is one record for each gateway that is dead, or that has named itself with a session or a boot.

Source: docs/adr/0033-gateways.md
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fleetpulse.core.messages import SIGNALS, Clock, GatewayEvent, Kind, Row


@dataclass(frozen=True, slots=True)
class Gateway:
    """What is remembered of a gateway.

    Attributes:
        device_id: the gateway.
        dead_since_ms: ``received_at`` of its death, epoch milliseconds; None while it is alive.
        session: of its newest signal that was not late.
        boot: likewise.
    """

    device_id: str
    dead_since_ms: int | None = None
    session: str | None = None
    boot: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is remembered of it."""
        return self.dead_since_ms is None and self.session is None and self.boot is None


@dataclass(slots=True)
class Gateways:
    """Finds deaths and returns among rows.

    Attributes:
        allowed_lateness_ms: of the installation: a signal that is older does not say which session is the newest.
        known: the gateways, by id.
    """

    allowed_lateness_ms: int
    known: dict[str, Gateway] = field(default_factory=dict[str, Gateway])

    def read(self, row: Row) -> GatewayEvent | None:
        """Take in the next row in arrival order; return what it is to the devices behind its device."""
        before = self.known.get(row.device_id, Gateway(row.device_id))
        if row.kind is Kind.DEATH:
            if row.gateway != row.device_id or _is_stale(before, row):
                return None
            self._remember(replace(before, dead_since_ms=row.received_at_ms))
            return GatewayEvent.DEATH
        if row.kind not in SIGNALS:
            return None
        returns = before.dead_since_ms is not None and _voids(row, before.dead_since_ms)
        after = replace(before, dead_since_ms=None) if returns else before
        if row.gateway == row.device_id and not self._is_late(row):
            session, boot = row.session or before.session, row.boot or before.boot
            after = replace(after, session=session, boot=boot)
        if after != before:
            self._remember(after)
        return GatewayEvent.RETURN if returns else None

    def remember(self, gateways: Iterable[Gateway]) -> None:
        """Go on with what an earlier run remembered."""
        for one in gateways:
            self._remember(one)

    def _remember(self, gateway: Gateway) -> None:
        if gateway.is_plain:
            self.known.pop(gateway.device_id, None)
        else:
            self.known[gateway.device_id] = gateway

    def _is_late(self, row: Row) -> bool:
        return row.clock is Clock.DEVICE and _sent_ms(row) + self.allowed_lateness_ms <= row.received_at_ms


def _is_stale(gateway: Gateway, will: Row) -> bool:
    if will.session is not None and gateway.session is not None:
        return will.session != gateway.session
    return will.boot is not None and gateway.boot is not None and will.boot != gateway.boot


def _voids(row: Row, dead_since_ms: int) -> bool:
    return row.is_direct or row.kind is Kind.BIRTH or _sent_ms(row) > dead_since_ms


def _sent_ms(row: Row) -> int:
    return row.received_at_ms if row.event_time_ms is None else min(row.event_time_ms, row.received_at_ms)
