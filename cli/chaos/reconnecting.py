"""Devices that reconnect: MQTT clients with a will and a wrong clock.

After each lost connection, a device connects in a new session.

Rule 1: a connection is lost by a TCP reset, without a DISCONNECT: the broker publishes the will.
Rule 2: a signal counts from its acknowledgement on; a signal that is lost with its connection is
not sent again.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from types import TracebackType
from typing import Final, Self

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from cli.chaos.load import Acknowledged, Message
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.presence.presence_time import classify_event_time, with_presence_time
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Kind, Row
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.system.wall_clock import wall_clock_ms

LATENESS_MS: Final = 10_000  # allowed lateness of the home
CLOCK_OFFSETS_S: Final = (-3_600, -600, -5, -1, 0, 1, 600, 3_600)  # seconds by which clocks are ahead
_ANSWER_S: Final = 5.0  # timeout of an answer of the broker
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close by a reset
_RESETS: Final = 0.25  # share of a device's turns in which its connection is lost
_PAUSE_S: Final = 0.1  # pause between two turns, across all devices


class ReconnectingDevice:
    """MQTT client of one device, with a will.

    Args:
        address: address of the broker.
        name: id of the device.
        site: site of the device.
        ahead_s: seconds by which the device's clock is ahead.

    Attributes:
        acknowledged: signals that the broker acknowledged.
        sessions: number of sessions whose birth was acknowledged.
    """

    def __init__(self, address: BrokerAddress, name: str, site: str = "site", ahead_s: int = 0) -> None:
        self.acknowledged: list[Acknowledged] = []
        self.name, self.site = name, site
        self._address, self._ahead_ms = address, ahead_s * 1000
        self._session = self._seq = self.sessions = 0
        self._client: paho.Client | None = None

    def connect(self) -> bool:
        """Connect in a new session and send a birth.

        Returns:
            Whether the broker acknowledged the birth in time.
        """
        self._drop()
        self._session += 1
        client = paho.Client(CallbackAPIVersion.VERSION2, client_id=self.name, reconnect_on_failure=False)
        if self._address.username:
            client.username_pw_set(self._address.username, self._address.password)
        client.will_set(self._topic(Kind.DEATH), json.dumps({"session": str(self._session)}), qos=1)
        try:
            client.connect(self._address.host, self._address.port, keepalive=60)
        except OSError:
            return False
        client.loop_start()
        self._client = client
        deadline_s = time.monotonic() + _ANSWER_S
        while not client.is_connected():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.01)
        born = self.send(Kind.BIRTH)
        self.sessions += born
        return born

    def send(self, kind: Kind = Kind.HEARTBEAT) -> bool:
        """Send a signal; return whether the broker acknowledged it in time."""
        if self._client is None or not self._client.is_connected():
            return False
        self._seq += 1
        now_ms = wall_clock_ms()
        at_ms, boot = now_ms + self._ahead_ms, f"boot-{self.name}"
        payload = json.dumps({"ts": at_ms, "boot": boot, "seq": self._seq, "session": str(self._session)}).encode()
        sent = self._client.publish(self._topic(kind), payload, qos=1)
        with suppress(RuntimeError, ValueError):  # the connection is lost
            sent.wait_for_publish(_ANSWER_S)
            if sent.is_published():
                identity = self.name, kind.value, at_ms, boot, self._seq
                message = Message(self._topic(kind), payload, identity, presence_ms(self._topic(kind), payload, now_ms))
                self.acknowledged.append(Acknowledged(message, wall_clock_ms()))
                return True
        return False

    def reset(self) -> None:
        """Reset the TCP connection, so that the broker publishes the will."""
        sock = self._client.socket() if self._client is not None else None
        if isinstance(sock, socket.socket):
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.shutdown(socket.SHUT_RD)  # wakes the client's thread
        self._drop(sock)

    def leave(self) -> None:
        """Disconnect in order, so that the broker discards the will."""
        if self._client is not None and self._client.is_connected():
            self._client.disconnect()
        self._drop()

    def _drop(self, sock: object = None) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        if isinstance(sock, socket.socket):
            with suppress(OSError):
                sock.close()
        client.loop_stop()

    def _topic(self, kind: Kind) -> str:
        return f"fleet/{self.site}/{self.name}/{kind.value}"


def presence_ms(topic: str, payload: bytes, sent_ms: int) -> int:
    """Return the instant for which a signal proves that its device was alive, epoch milliseconds.

    The signal is judged as if it were received when it is sent, at a frontier that is behind by the
    allowed lateness. It proves no earlier instant if it is received later.

    Args:
        topic: topic of the signal.
        payload: its payload.
        sent_ms: instant of sending, epoch milliseconds.
    """
    row, deployment = decode(topic, payload, sent_ms), Deployment(LATENESS_MS)
    assert isinstance(row, Row), "devices of chaos send valid signals"
    clock_limits = (deployment.max_clock_lead_ms, deployment.max_backlog_ms)
    trust = classify_event_time(row, sent_ms - LATENESS_MS, *clock_limits)
    return with_presence_time(row, trust).at_ms


class ReconnectingDevices:
    """Devices whose connections are reset at random while the context is open.

    Args:
        address: address of the broker.
        count: number of devices.
        seed: seed of the random resets.
    """

    def __init__(self, address: BrokerAddress, count: int, seed: int) -> None:
        self._devices = [
            ReconnectingDevice(
                address, f"again-{number:03d}", f"site-{number % 3}", CLOCK_OFFSETS_S[number % len(CLOCK_OFFSETS_S)]
            )
            for number in range(count)
        ]
        self._random = Random(f"{seed} again")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def acknowledged(self) -> Sequence[Acknowledged]:
        """Signals of all devices that the broker acknowledged."""
        return [one for device in self._devices for one in device.acknowledged]

    @property
    def reconnects(self) -> int:
        """Number of sessions after the first one of each device."""
        return sum(max(0, device.sessions - 1) for device in self._devices)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Disconnect all devices."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        turn = 0
        while self._devices and not self._stopped.wait(_PAUSE_S):
            device = self._devices[turn % len(self._devices)]
            turn += 1
            if turn > len(self._devices) and self._random.random() < _RESETS:
                device.reset()
            if not device.send():
                device.connect()
        for device in self._devices:
            device.leave()
