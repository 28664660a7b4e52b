"""Incremental MQTT 3.1.1 codec for a receiving client: packets to bytes and back.

Rule 1: the codec uses no socket and no clock. Section numbers refer to OASIS MQTT 3.1.1.
Rule 2: memory is bounded. A payload beyond the limit is cut to one byte more than the limit.
The cache of decoded topics has a maximum size.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

CONNACK, PUBLISH, PUBACK, SUBACK, UNSUBACK, PINGRESP = 2, 3, 4, 9, 11, 13
FAILURE: Final = 0x80  # of a subscription (3.9.3)
DISCONNECT: Final = b"\xe0\x00"
REFUSALS: Final = {
    1: "it does not support MQTT 3.1.1",
    2: "it rejects the client id",
    3: "it is unavailable",
    4: "the user name or password is wrong",
    5: "the client is not authorised",
}
_LONGEST_TOPIC: Final = 65_535
_SHORT_TOPIC: Final = 128  # bytes
_KNOWN_TOPICS: Final = 100_000  # cached short topics: at most 40 MB
_MAX_LENGTH_BYTES: Final = 4  # of a packet's length (2.2.3)
_USUAL: Final = 0x32  # PUBLISH with QoS 1, with or without the DUP and RETAIN flags
_NOT_A_MESSAGE: Final = "the broker sent a malformed PUBLISH packet"
_ANSWERS: Final = (CONNACK, PUBACK, SUBACK, UNSUBACK, PINGRESP)


class ProtocolError(Exception):
    """Data from the broker that violates MQTT 3.1.1."""


class Published(NamedTuple):
    """Message as the broker sent it.

    Attributes:
        topic: topic decoded from UTF-8, or ``not-utf-8``.
        payload: bytes of the payload; a longer payload is cut to one byte more than the limit.
        retained: whether this is a retained message, sent because of a new subscription.
        packet_id: packet identifier; None with QoS 0.
        redelivered: whether the broker has sent it before (flag DUP, 3.3.1.1).
    """

    topic: str
    payload: bytes
    retained: bool
    packet_id: int | None
    redelivered: bool = False


_as_published: Final = partial(tuple.__new__, Published)  # calling Published() costs three times as much


class Answer(NamedTuple):
    """Answer of the broker to a client packet: packet type and body."""

    kind: int
    body: bytes


class Reader:
    """Incremental parser of the byte stream from a broker.

    Args:
        max_payload: largest payload in bytes.
    """

    def __init__(self, max_payload: int) -> None:
        self.answers: list[Answer] = []
        self._max_payload = max_payload
        self._data = b""
        self._topics: dict[bytes, str] = {}  # cache: most topics occur again
        self._skip = 0  # remaining bytes of an oversized packet, to be dropped

    def feed(self, data: bytes) -> list[Published]:
        """Parse bytes; return the complete messages and append answers to ``answers``.

        Raises:
            ProtocolError: the bytes are not valid MQTT.
        """
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        data = self._data + data if self._data else data
        published: list[Published] = []
        at, end, known = 0, len(data), self._topics
        while end - at >= 2:
            header, length, body = data[at], data[at + 1], at + 2
            if length & 0x80:
                if end - at >= 3 and not data[at + 2] & 0x80:  # two length bytes: the usual case
                    length, body = length & 0x7F | data[at + 2] << 7, at + 3
                elif (found := _length(data, at + 1)) is None:
                    break
                else:
                    length, body = found
            after = body + length
            if header & 0xF6 == _USUAL and length >= 4 and after <= end and length <= self._max_payload:
                start = body + 2 + (data[body] << 8 | data[body + 1])
                number = data[start] << 8 | data[start + 1] if start + 2 <= after else 0
                if not number:
                    raise ProtocolError(_NOT_A_MESSAGE)
                name = data[body + 2 : start]
                topic = known.get(name) or self._new_topic(name)
                published.append(_as_published((topic, data[start + 2 : after], header & 1 == 1, number, header & 8 == 8)))
            elif header >> 4 == PUBLISH:
                if after > end and not self._suffices(header, length, data, body):
                    break
                published.append(self._message(header, data, body, after))
            elif header >> 4 in _ANSWERS:
                if after > end:
                    break
                self.answers.append(Answer(header >> 4, data[body:after]))
            else:
                raise ProtocolError(f"the broker sent a packet of unexpected type {header >> 4}")
            if after > end:
                self._skip = after - end
                after = end
            at = after
        self._data = data[at:]
        return published

    def _new_topic(self, name: bytes) -> str:
        topic = _topic(name)
        if len(name) <= _SHORT_TOPIC:
            if len(self._topics) >= _KNOWN_TOPICS:
                self._topics.clear()
            self._topics[name] = topic
        return topic

    def _suffices(self, header: int, length: int, data: bytes, body: int) -> bool:
        """Return whether an incomplete, oversized message has reached the size limit."""
        if length <= self._max_payload + _LONGEST_TOPIC or len(data) < body + 2:
            return False
        topic = data[body] << 8 | data[body + 1]
        return len(data) - body >= 2 + topic + (2 if header & 0x06 else 0) + self._max_payload + 1

    def _message(self, header: int, data: bytes, body: int, after: int) -> Published:
        quality = header >> 1 & 3
        payload = body + 2 + (data[body] << 8 | data[body + 1] if after >= body + 2 else 0)
        number = None
        if quality == 1:
            number = data[payload] << 8 | data[payload + 1] if after >= payload + 2 else 0
            payload += 2
        if quality > 1 or payload > after or number == 0:
            raise ProtocolError(_NOT_A_MESSAGE)
        topic = _topic(data[body + 2 : payload if number is None else payload - 2])
        content = data[payload : min(after, payload + self._max_payload + 1)]
        return Published(topic, content, bool(header & 1), number, number is not None and bool(header & 8))


def _topic(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return "not-utf-8"


def _length(data: bytes, at: int) -> tuple[int, int] | None:
    """Return the length of a packet and the offset of its body; None if incomplete."""
    length = 0
    for place in range(_MAX_LENGTH_BYTES):
        if at + place >= len(data):
            return None
        byte = data[at + place]
        length |= (byte & 0x7F) << 7 * place
        if not byte & 0x80:
            return length, at + place + 1
    raise ProtocolError("the broker sent a packet length of more than four bytes")


def _packet(header: int, body: bytes) -> bytes:
    length, rest = b"", len(body)
    while True:
        rest, low = rest >> 7, rest & 0x7F
        length += bytes([low | 0x80 if rest else low])
        if not rest:
            return bytes([header]) + length + body


def _text(text: str | bytes) -> bytes:
    encoded = text.encode() if isinstance(text, str) else text
    return len(encoded).to_bytes(2, "big") + encoded


class Will(NamedTuple):
    """MQTT will, which the broker publishes retained and with QoS 1."""

    topic: str
    payload: bytes


def encode_connect(
    client_id: str, username: str | None, password: str | None, *, keep_session: bool, will: Will | None = None
) -> bytes:
    """Encode CONNECT without an MQTT keep-alive: TCP detects lost connections."""
    flags = (0 if keep_session else 0x02) | (0x80 if username else 0) | (0x40 if password else 0)
    flags |= 0 if will is None else 0x04 | 0x08 | 0x20  # a will, of QoS 1, retained (3.1.2)
    body = b"\x00\x04MQTT\x04" + bytes([flags]) + b"\x00\x00" + _text(client_id)
    body += b"" if will is None else _text(will.topic) + _text(will.payload)
    return _packet(0x10, body + (_text(username) if username else b"") + (_text(password) if password else b""))


def encode_subscribe(number: int, topics: Sequence[str]) -> bytes:
    """Encode SUBSCRIBE with QoS 1 for each topic."""
    return _packet(0x82, number.to_bytes(2, "big") + b"".join(_text(topic) + b"\x01" for topic in topics))


def encode_unsubscribe(number: int, topics: Iterable[str]) -> bytes:
    """Encode UNSUBSCRIBE."""
    return _packet(0xA2, number.to_bytes(2, "big") + b"".join(_text(topic) for topic in topics))


def encode_publish(number: int, topic: str, payload: bytes, *, retain: bool = False) -> bytes:
    """Encode PUBLISH with QoS 1."""
    return _packet(0x32 | retain, _text(topic) + number.to_bytes(2, "big") + payload)


def encode_puback(numbers: Iterable[int]) -> bytes:
    """Encode one PUBACK for each packet number."""
    written = array("H", numbers)
    if sys.byteorder == "little":
        written.byteswap()
    places, packet = written.tobytes(), bytearray(b"\x40\x02\0\0" * len(written))
    packet[2::4], packet[3::4] = places[::2], places[1::2]
    return bytes(packet)
