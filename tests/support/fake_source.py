"""Fake message source for the bridge, instead of a broker."""

from collections.abc import Iterable

from fleetpulse.io.mqtt.subscriber import AckToken, Arrived


class Records:
    """Message source that returns messages of a test and records the bridge's calls."""

    def __init__(self) -> None:
        self.connected, self.connections = True, 1
        self.problem: str | None = None
        self.cause = "broker"
        self.coming: list[Arrived] = []
        self.acknowledged: list[AckToken | None] = []
        self.canaries: list[Arrived] = []
        self.sent: list[tuple[str, bytes]] = []  # commands
        self.confirming: list[AckToken] = []

    def poll(self, timeout_s: float) -> list[Arrived]:
        coming, self.coming = self.coming, []
        return coming

    def idle(self, timeout_s: float) -> None:
        pass

    def ack(self, tokens: Iterable[AckToken | None]) -> None:
        self.acknowledged += tokens

    def publish(self, topic: str, payload: bytes) -> bool:
        self.canaries.append(Arrived(topic, payload, False, None))
        return True

    def send(self, topic: str, payload: bytes) -> AckToken | None:
        self.sent.append((topic, payload))
        return self.connections, len(self.sent)

    def confirmed(self) -> list[AckToken]:
        found, self.confirming = self.confirming, []
        return found

    def reconnect(self, why: str, cause: str = "broker") -> None:
        self.connections += 1

    def close(self, *, forget: bool = False) -> None:
        self.connected = False
