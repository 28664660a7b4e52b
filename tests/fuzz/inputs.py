"""Generators of fuzzing inputs: valid messages, malformed ones, and mutations of both."""

import base64
import json
from collections.abc import Iterator
from random import Random
from typing import Any, Final

from hypothesis import strategies as st

from fleetpulse.paths import ROOT
from tests.fuzz.laws import NOW, USUAL, packet

LEVELS: Final = ("fleet", "s", "d", "_", "z", "y", "x", "$SYS", "replay", "")
KINDS: Final = ("ack", "heartbeat", "telemetry", "error", "birth", "death", "control", "registry", "policy", "gap", "tick", "")
FIELDS: Final = (
    *("ts", "seq", "boot", "code", "uptime_s", "firmware", "gateway", "metrics", "device_id", "site", "kind", "op", "class"),
    *("from", "until", "after", "effective_from", "policy", "why", "m", "at", "n", "e", "time", "t", "a", "b"),
)
ODD: Final = (
    *(None, True, 0, -1, 1.5, NOW, NOW / 1000, NOW * 1000, 2**63 - 1, 2**63, 10**30, 1e308, "", "d", "s", "heartbeat", "open"),
    *("close", "add", "2023-11-14T22:13:20Z", "9999-12-31T23:59:59Z", "1700000000", "\x00", "\ud800", "\u202e", "x" * 257),
    *("nan", "-inf", {}, [], {"at": NOW}, {"at": 1e300}, {"at": "nan"}, {"b": "x"}),
    *(10**4_298, {"at": 10**4_298}),  # Python converts at most 4,300 digits
)
TOKENS: Final = (
    '"',
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "/",
    "+",
    "#",
    "1e999",
    "NaN",
    "-Infinity",
    "9" * 4_299,
    "\\ud800",
    "\ufeff",
    "\n",
)

_MAPPED: Final = ((b"z/d/s", "m"), (b"x/1/d", "t"), (b"y/s/d/error", "time"))
_NUMBER_TEMPLATES: Final = (b'{"ts":%b}', b'{"seq":-%b}', b'{"m":{"at":%b}}', b'{"t":%b}', b'{"time":%b.5}')

_values = st.one_of(
    st.sampled_from(ODD),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
)
_contents = st.dictionaries(st.sampled_from(FIELDS), _values, max_size=6)
_nested = st.integers(1, 1_200).map(lambda levels: b'{"a":' * levels + b"1" + b"}" * levels)
_payloads = st.one_of(
    _contents.map(lambda content: json.dumps(content).encode()),
    _contents.map(lambda content: json.dumps(content, ensure_ascii=False).encode(errors="surrogatepass")),
    st.binary(max_size=60),
    _nested,
    st.tuples(st.sampled_from(_NUMBER_TEMPLATES), st.integers(1, 25) | st.integers(4_290, 4_302)).map(
        lambda drawn: drawn[0] % (b"9" * drawn[1])
    ),
)
_levels = st.one_of(st.sampled_from(LEVELS), st.text(max_size=6).map(lambda text: text.replace("\n", "")), st.just("n" * 129))
_topics = st.one_of(
    st.tuples(_levels, _levels, st.sampled_from(KINDS)).map(lambda parts: "/".join(("fleet", *parts))),
    st.tuples(st.sampled_from(("z", "y/s", "x/w")), _levels, st.sampled_from((*KINDS, "s"))).map("/".join),
    st.lists(_levels, max_size=6).map("/".join),
).map(lambda topic: topic.encode(errors="surrogatepass"))
_raw = st.binary(max_size=12).map(lambda topic: topic.replace(b"\n", b""))
_long = st.integers(100, 65_535).map(lambda size: b"fleet/s/" + b"x" * (size - 8))

messages = st.tuples(st.one_of(_topics, _topics, st.sampled_from(USUAL), _raw, _long), _payloads).map(b"\n".join)
"""Strategy of inputs: a topic, a line feed, and a payload."""


def seeds() -> list[bytes]:
    """Return seed messages: one of each kind, each odd value in each field, and samples of the profiles."""
    found = [f"fleet/s/d/{kind}\n".encode() + json.dumps(_usual(kind)).encode() for kind in KINDS]
    found += [f"fleet/s/d/telemetry\n{json.dumps({name: value})}".encode() for name in FIELDS[:13] for value in ODD]
    found += [topic + b"\n" + json.dumps({name: value}).encode() for topic, name in _MAPPED for value in ODD]
    found += [b'z/d/s\n{"m":{"at":1700000000},"n":1,"e":"x"}', b'y/s/d/error\n{"time":"2023-11-14T22:13:20Z"}', b"x/1/d\nON"]
    found += [bytes([number]) + b"\n" + json.dumps({**_usual("error"), name: 7}).encode() for number, name in enumerate(FIELDS)]
    return [*found, *_samples()]


def _samples() -> Iterator[bytes]:
    for file in sorted((ROOT / "tests" / "golden" / "profiles").glob("*.json")):
        for one in json.loads(file.read_text())["samples"]:
            payload = base64.b64decode(one["base64"]) if "base64" in one else one["payload"].encode()
            yield one["topic"].encode() + b"\n" + payload


def _usual(kind: str) -> dict[str, Any]:
    content: dict[str, Any] = {"ts": NOW, "seq": 7, "boot": "b", "uptime_s": 3, "metrics": {"t": 1.5}}
    return content | ({"op": "open", "from": NOW, "until": NOW} if kind in KINDS[6:] else {"code": "e1"})


def packet_seeds() -> list[bytes]:
    """Return seed bytes of a connection, each after two bytes that select the cuts."""
    publish = packet(b"fleet/s/d/heartbeat", b'{"ts":1700000000000}')
    stream = (
        b"\x20\x02\x00\x00\x90\x03\x00\x01\x01"
        + publish
        + b"\x40\x02\x00\x01\xd0\x00"
        + packet(b"z/d/s", b"x" * 400, 2)
        + publish
    )
    return [
        b"\x05\x09" + stream,
        b"\x00\x00" + publish,
        b"\x01\x02\x30\x06\x00\x01t{}1",
        b"\x07\x30\x33\xff\xff\x7f\x00\x01t\x00\x01{}",
    ]


def mutated(data: bytes, other: bytes, random: Random) -> bytes:
    """Apply one to four random changes: cut, duplicate, cross with other bytes, insert tokens, or change bytes."""
    for _ in range(random.randint(1, 4)):
        begin, end = sorted((random.randint(0, len(data)), random.randint(0, len(data))))
        match random.randrange(6):
            case 0:
                data = data[:begin] + data[end:]
            case 1:
                data = data[:end] + data[begin:]
            case 2:
                data = data[:begin] + other[random.randint(0, len(other)) :]
            case 3:
                data = data[:begin] + random.choice(TOKENS).encode(errors="surrogatepass") + data[begin:]
            case 4:
                data = data[:begin] + random.randbytes(random.randint(1, 3)) + data[begin + 1 :]
            case _:
                data = data[:begin] + str(random.choice(ODD)).encode(errors="surrogatepass") + data[end:]
    return data
