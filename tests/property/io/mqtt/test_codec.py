"""MQTT codec: cuts of the bytes do not change the messages, and bytes that are not MQTT raise an error."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.io.mqtt import codec
from fleetpulse.io.mqtt.codec import Answer, ProtocolError, Published, Reader

LIMIT = 200
TOPICS = st.text(min_size=1, max_size=12).filter(lambda topic: "\ud800" not in topic)
SENT = st.tuples(TOPICS, st.binary(max_size=300), st.booleans(), st.none() | st.integers(1, 65_535))


def broker_publish(topic: str, payload: bytes, retained: bool, number: int | None) -> bytes:
    """Return a PUBLISH as a broker sends it, with lengths of one to four bytes."""
    name = topic.encode()
    body = len(name).to_bytes(2, "big") + name + (b"" if number is None else number.to_bytes(2, "big")) + payload
    size, length = len(body), b""
    while size > 127:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([0x30 | (0 if number is None else 2) | retained]) + length + bytes([size]) + body


def read_pieces(data: bytes, cuts: list[int]) -> tuple[list[Published], list[Answer]]:
    reader, published = Reader(LIMIT), list[Published]()
    for begin, end in pairwise([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]):
        published += reader.feed(data[begin:end])
    return published, reader.answers


@given(st.lists(SENT, max_size=8), st.lists(st.integers(0, 2_000), max_size=12))
def test_cuts_of_the_bytes_do_not_change_the_messages(sent: list[tuple[str, bytes, bool, int | None]], cuts: list[int]) -> None:
    data = b"".join(b"\x40\x02\x00\x07" + broker_publish(*one) for one in sent)
    published, answers = read_pieces(data, cuts)
    assert published == [Published(topic, payload[: LIMIT + 1], retained, number) for topic, payload, retained, number in sent]
    assert answers == [Answer(codec.PUBACK, b"\x00\x07")] * len(sent)


@given(st.integers(1, 2_000_000), st.integers(1, 70_000))
def test_a_long_message_is_truncated_and_the_next_one_is_complete(size: int, step: int) -> None:
    long, after = broker_publish("t", bytes(size), False, 1), broker_publish("t", b"x", False, 2)
    data, reader, published, buffered = long + after, Reader(LIMIT), list[Published](), 0
    for begin in range(0, len(data), step):
        published += reader.feed(data[begin : begin + step])
        buffered = max(buffered, len(reader._data))  # pyright: ignore[reportPrivateUsage]
    assert published == [Published("t", bytes(min(size, LIMIT + 1)), False, 1), Published("t", b"x", False, 2)]
    assert buffered <= LIMIT + 65_535 + step + 16


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=5))
def test_bytes_that_are_not_mqtt_raise_a_protocol_error(data: bytes, cuts: list[int]) -> None:
    try:
        published, answers = read_pieces(data, cuts)
    except ProtocolError:
        return
    assert sum(len(one.payload) for one in published) + sum(len(one.body) for one in answers) <= len(data)


def test_encoded_packets_follow_the_standard() -> None:
    assert (
        codec.encode_connect("b", "u", "p", keep_session=True)
        == b"\x10\x13\x00\x04MQTT\x04\xc0\x00\x00\x00\x01b\x00\x01u\x00\x01p"
    )
    assert codec.encode_connect("b", None, None, keep_session=False) == b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x00\x00\x01b"
    assert codec.encode_subscribe(7, ["a/#"]) == b"\x82\x08\x00\x07\x00\x03a/#\x01"
    assert codec.encode_unsubscribe(8, ["a"]) == b"\xa2\x05\x00\x08\x00\x01a"
    assert codec.encode_publish(9, "t", b"x" * 200) == b"\x32\xcd\x01\x00\x01t\x00\x09" + b"x" * 200
    assert codec.encode_puback([1, 258]) == b"\x40\x02\x00\x01\x40\x02\x01\x02"


@given(st.lists(st.integers(1, 65_535), max_size=20))
def test_every_message_is_acknowledged_by_its_packet_id(numbers: list[int]) -> None:
    assert codec.encode_puback(numbers) == b"".join(b"\x40\x02" + number.to_bytes(2, "big") for number in numbers)
