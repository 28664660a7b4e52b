"""Messages of other formats, from mosquitto_pub to bronze, through the embedded broker, the bridge and landing.

Each format has devices of its own. Users of the broker publish its messages, and bronze must have exactly its rows.
"""

import gzip
import json
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.supervisor.processes import Run
from fleetpulse.core.messages.decode import NO_TS
from fleetpulse.core.messages.sparkplug import COMPRESSED, shortened
from fleetpulse.core.messages.text import MAX_ID_BYTES, MAX_TEXT
from fleetpulse.core.replay import outcome
from fleetpulse.core.rows import FROM_DEVICES, Row
from fleetpulse.core.tables import QUARANTINE
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.sparkplug.sparkplug_b_pb2 import Payload
from fleetpulse.io.system.process import read_status
from fleetpulse.io.tables import tables
from fleetpulse.reports import messages as bronze
from tests.support import wait

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),  # each wait has its own, shorter limit
    pytest.mark.skipif(not shutil.which("mosquitto_pub"), reason="mosquitto_pub is not installed (package mosquitto-clients)"),
]
await_that = partial(wait.await_that, limit_s=60)
PROFILES = ("tasmota", "zigbee2mqtt", "homeassistant", "esphome", "shelly", "aws-presence", "chirpstack", "thingsboard")
RULES = """
[[mapping]]
topic = "scan/{gateway}"
site = "hall"
kind = "telemetry"
each = "@"
device = { path = "macid" }
metrics = "{t: t}"

[[mapping]]
topic = "/fields/{device}"
site = "hall"
kind = "telemetry"
seq = "seq"
code = "code"
"""
RULES += "".join(
    f'\n[[mapping]]\ntopic = "times/{{device}}/{name}"\nsite = "hall"\nkind = "heartbeat"\nmetrics = "none"\nts = "t"\n{more}\n'
    for name, more in {
        "s": 'ts_unit = "s"',
        "us": 'ts_unit = "us"',
        "ns": 'ts_unit = "ns"',
        "iso": 'ts_unit = "iso"',
        "oslo": 'ts_unit = "iso"\nts_zone = "Europe/Oslo"',
    }.items()
)
GRANTS = {
    "plug-2": (),
    "livingroom": (),
    "shelly-1": (),
    "pump": (),
    "own-1": (),
    "edge": ("--sparkplug", "plant/line"),
    "hub": ("--topic", "zigbee2mqtt/#", "--topic", "homeassistant/#"),
    "server": ("--topic", "application/#", "--topic", "v1/gateway/#"),
    "scanner": ("--topic", "scan/hall", "--topic", "/fields/#", "--topic", "times/#"),
}
AT_MS = 1_769_999_999_000
LONG = "x" * MAX_ID_BYTES
Expected = dict[str, Any]


@dataclass(frozen=True)
class Message:
    """Message of a user, and its rows.

    Attributes:
        user: user of the broker that publishes it.
        topic: its topic.
        payload: text, bytes, or a value that is written as JSON.
        rows: fields of the expected rows of bronze that are not null.
        retained: whether the broker retains it.
    """

    user: str
    topic: str
    payload: Any
    rows: tuple[Expected, ...] = ()
    retained: bool = False

    @property
    def raw(self) -> bytes:
        if isinstance(self.payload, bytes):
            return self.payload
        return (self.payload if isinstance(self.payload, str) else json.dumps(self.payload)).encode()


def heard(device_id: str, kind: str = "telemetry", note: str | None = NO_TS, metrics: Any = None, **more: Any) -> Expected:
    """Return the row of a message whose event time is its time of receipt."""
    content = {"device_id": device_id, "site": "hall", "kind": kind, "clock": "received", "note": note, **more}
    content["metrics"] = None if metrics is None else json.dumps(metrics, separators=(",", ":"))
    return {name: value for name, value in content.items() if value is not None}


def timed(device_id: str, kind: str, at_ms: int, **more: Any) -> Expected:
    """Return the row of a message with a time of its own."""
    return heard(device_id, kind, clock="device", event_time_ms=at_ms, **{"note": None, **more})


def died(device_id: str, **more: Any) -> Expected:
    return heard(device_id, "death", None, **more)


def values(device: str, payload: Any, note: str | None = None, *, raw: Any = None, **more: Any) -> Message:
    """Return a message of fields and its row; the row's metrics are the payload."""
    row = heard(device, note=NO_TS if note is None else f"{NO_TS}; {note}; it is left out", metrics=payload, **more)
    return Message("scanner", f"/fields/{device}", payload if raw is None else raw, (row,))


def time_of(name: str, value: Any) -> Message:
    return Message("scanner", f"times/{name}/{name}", {"t": value}, (timed(name, "heartbeat", AT_MS),))


def sparkplug(**content: Any) -> bytes:
    return Payload(timestamp=AT_MS, **content).SerializeToString()


def connection(word: str, session: str, *rows: Expected) -> Message:
    content = {"clientId": "pump", "sessionIdentifier": session, "timestamp": AT_MS, "versionNumber": 0}
    return Message("pump", f"$aws/events/presence/{word}/pump", content, rows)


def plug(topic: str, payload: Any, *rows: Expected, user: str = "plug-1", retained: bool = False) -> Message:
    return Message(user, topic, payload, rows, retained)


STATE = {"Time": "2026-02-02T03:40:00", "UptimeSec": 13, "POWER": "ON"}
FIRMWARE, BOOTS = {"Info1": {"Version": "13.1.0(tasmota)"}}, {"Info3": {"BootCount": 7}}
METRIC = Payload.Metric(name="t", double_value=21.5, datatype=10)
INNER = zlib.compress(sparkplug(metrics=[METRIC]))
ALGORITHM = Payload.Metric(name="algorithm", string_value="DEFLATE")
NODE = {"site": "plant", "gateway": "plant:line", "metrics": {"t": 21.5}}
UPLINK = {"time": "2026-02-02T03:39:59+01:00", "fCnt": 10, "rxInfo": [{"gatewayId": "gw-1"}, {"gatewayId": "gw-2"}]}
LONG_NOTE = f'the id is shortened to {MAX_ID_BYTES} bytes; got {len(LONG) + 11}: "{f"plant:line:{LONG}"[:MAX_TEXT]}"'
NOT_SET = "ts must be 2000-01-01 or later; got {}"
HUB, OPEN = {"gateway": "zigbee2mqtt"}, {"open": True}
ONLINE, OFFLINE = {"state": "online"}, {"state": "offline"}

FORMATS: dict[str, list[Message]] = {
    "presence by the payload": [
        plug("tele/plug-1/STATE", {"POWER": "FORGED"}, user="plug-2"),
        plug("tele/plug-1/STATE", STATE, heard("plug-1", uptime_s=13, metrics=STATE)),
        plug("tele/plug-1/LWT", "Online", heard("plug-1", "birth"), retained=True),
        plug("tele/plug-1/LWT", "Away"),
        plug("tele/plug-1/LWT", "Offline", died("plug-1"), retained=True),
        Message("hub", "zigbee2mqtt/door/availability", ONLINE, (heard("door", "birth", metrics=ONLINE, **HUB),)),
        Message("hub", "zigbee2mqtt/door/availability", OFFLINE, (died("door", metrics=OFFLINE, **HUB),)),
        Message("hub", "zigbee2mqtt/word/availability", "offline", (died("word", **HUB),)),
        Message("hub", "homeassistant/light/desk/availability", "offline", (died("light:desk", gateway="homeassistant"),)),
    ],
    "the device is the first level": [
        Message("livingroom", "livingroom/status", "online", (heard("livingroom", "birth"),), retained=True),
        Message("own-1", "fleet/hall/own-1/heartbeat", {}, (heard("own-1", "heartbeat"),)),
    ],
    "names over several levels": [
        Message("hub", f"zigbee2mqtt/{room}/x/door", OPEN, (heard(f"{room}:x:door", metrics=OPEN, **HUB),))
        for room in ("living_room", "kitchen")
    ],
    "several devices in one payload": [
        Message("scanner", "scan/hall", [{"macid": "mac-a", "t": 1}, {"macid": "mac-b", "t": 2}], tuple(
            heard(f"mac-{name}", gateway="hall", metrics={"t": t}) for name, t in (("a", 1), ("b", 2))
        )),
        Message("server", "v1/gateway/telemetry", {"key-a": [{"ts": AT_MS, "values": {"t": 1}}], "key-b": [{"ts": AT_MS}]}, (
            timed("key-a", "telemetry", AT_MS, metrics={"t": 1}), timed("key-b", "telemetry", AT_MS, metrics={"ts": AT_MS})
        )),
    ],
    "session, boot, gateway, firmware, uptime": [
        connection("connected", "a", timed("pump", "birth", AT_MS, session="a", metrics={"versionNumber": 0})),
        connection("connected", "b", timed("pump", "birth", AT_MS, session="b", metrics={"versionNumber": 0})),
        connection("disconnected", "a", died("pump", session="a", metrics={"versionNumber": 0, "disconnectReason": None})),
        plug("tele/plug-2/INFO1", FIRMWARE, heard("plug-2", firmware="13.1.0(tasmota)", metrics=FIRMWARE), user="plug-2"),
        plug("tele/plug-2/INFO3", BOOTS, heard("plug-2", boot="7", metrics=BOOTS), user="plug-2"),
    ],
    "lists in paths": [
        Message("server", "application/1/device/0101/event/up", UPLINK, (
            timed("0101", "telemetry", AT_MS, seq=10, gateway="gw-1"),
        )),
    ],
    "times": [
        time_of("s", "1769999999"),
        time_of("us", AT_MS * 1_000 + 999),
        time_of("ns", str(AT_MS * 1_000_000)),
        time_of("iso", "2026-02-02T02:39:59Z"),
        time_of("oslo", "2026-02-02T03:39:59"),
    ],
    "clock not set": [
        Message("shelly-1", "shelly-1/online", "true", (heard("shelly-1", "birth"),)),
        *(
            Message("shelly-1", "shelly-1/events/rpc", {"params": {"ts": ts, "sys": {"uptime": 3}}}, (
                heard("shelly-1", note=NOT_SET.format(found), uptime_s=3, metrics={"ts": ts, "sys": {"uptime": 3}}),
            ))
            for ts, found in ((3.45, "3450.0"), (0, "0"))
        ),
        Message("shelly-1", "shelly-1/events/rpc", {"params": {"ts": AT_MS / 1000}}, (
            timed("shelly-1", "telemetry", AT_MS, metrics={"ts": AT_MS / 1000}),
        )),
    ],
    "numbers that JSON does not have": [
        values("nan", {"signal": None}, raw=b'{"signal":NaN}'),
        values("infinite", {"signal": None, "t": None}, raw=b'{"signal":-Infinity,"t":1e400}'),
    ],
    "a bad field": [
        values("text", {"seq": "7"}, seq=7),
        values("negative", {"seq": -1}, "seq must be a whole number from 0 to 2^63-1; got -1"),
        values("empty", {"code": ""}, f'code must be a printable text or a whole number of 1 to {MAX_TEXT} characters; got ""'),
    ],
    "an empty payload": [
        plug("tele/plug-3/LWT", "Online", heard("plug-3", "birth"), user="plug-3", retained=True),
        plug("tele/plug-3/LWT", "", user="plug-3", retained=True),
        plug("tele/plug-3/STATE", "", user="plug-3"),
        plug("tele/plug-3/RESULT", "7", heard("plug-3", metrics={"RESULT": 7}), user="plug-3"),
    ],
    "plain values": [
        Message("livingroom", f"livingroom/sensor/{name}/state", "21.5", (heard("livingroom", metrics={name: 21.5}),))
        for name in ("inside", "outside", "cellar")
    ],
    "Sparkplug": [
        Message("edge", "spBv1.0/plant/NDATA/line", sparkplug(uuid=COMPRESSED, body=INNER, metrics=[ALGORITHM]), (
            timed("plant:line", "telemetry", AT_MS, **NODE),
        )),
        Message("edge", f"spBv1.0/plant/DDATA/line/{LONG}", sparkplug(metrics=[METRIC]), (
            timed(shortened(f"plant:line:{LONG}"), "telemetry", AT_MS, note=LONG_NOTE, **NODE),
        )),
    ],
    "other bytes": [
        values("bom", {"t": 2}, raw=b'\xef\xbb\xbf{"t": 1, "t": 2}'),
        values("gzip", None, raw=gzip.compress(b"{}", mtime=0)),
        values("cbor", None, raw=b"\xa1\x61t\x18\x2a"),
    ],
}  # fmt: skip
SPACE = [
    Message("hub", "zigbee2mqtt/lamp 1", {"on": True}),
    Message("hub", "zigbee2mqtt/lamp-2", {"on": True}, (heard("lamp-2", metrics={"on": True}, **HUB),)),
]


@dataclass
class Installation:
    """Home with its broker, and the passwords of users."""

    home: Home
    broker: BrokerAddress
    passwords: dict[str, str]

    def grant(self, user: str, *options: str) -> None:
        done = CliRunner().invoke(app, ["access", "grant", user, *options, "--home", str(self.home.path)])
        assert done.exit_code == 0, done.output
        self.passwords[user] = done.stdout.split()[0]

    def publish(self, one: Message) -> int:
        """Publish a message and await its acknowledgement; return the exit code of mosquitto_pub."""
        content = ["-s"] if one.raw else ["-n"]
        login = ["-h", self.broker.host, "-p", str(self.broker.port), "-u", one.user, "-P", self.passwords[one.user]]
        command = ["mosquitto_pub", *login, "-q", "1", "-t", one.topic, *content, *(["-r"] if one.retained else [])]
        return subprocess.run(command, input=one.raw, capture_output=True, timeout=30, check=False).returncode

    def quarantine(self) -> list[dict[str, Any]]:
        return tables.query(self.home, "SELECT topic, reason FROM quarantine", tables=[QUARANTINE.name])

    def rows(self) -> list[Row]:
        """Return the rows of devices in bronze, without copies: a slow machine acknowledges a message too late."""
        found = (one for one in bronze.rows(self.home) if one.kind in FROM_DEVICES)
        return [*{(one.device_id, one.digest): one for one in found}.values()]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Run broker, bridge and landing on a home with profiles and rules, and publish all messages of `FORMATS`."""
    path = tmp_path_factory.mktemp("formats") / "home"
    home = Home(path)
    home.prepare(None)
    home.mapping.write_text(RULES)
    for profile in (*PROFILES, "sparkplug"):
        added = CliRunner().invoke(app, ["map", "add", profile, "--site", "hall", "--home", str(path)])
        assert added.exit_code == 0, added.output
    running = Installation(home, BrokerAddress("", 0), {})
    for user, options in GRANTS.items():
        running.grant(user, *options)
    with Run(home) as run:
        running.broker = run.use_broker(None)
        for user in ("plug-1", "plug-3"):  # while the broker runs
            running.grant(user)
        for job in ("bridge", "landing"):
            run.start(job)
        await_that(lambda: read_status(home.run("bridge")).get("connected"), what="the connection of the bridge")
        for messages in FORMATS.values():
            for one in messages:
                assert running.publish(one) == 0, f"{one.topic} was not acknowledged"
        expected = sum(len(one.rows) for messages in FORMATS.values() for one in messages)
        await_that(lambda: len(running.rows()) >= expected, what=f"{expected} rows", limit_s=20)
        yield running


def content(row: Row) -> Expected:
    """Return the non-null fields of a row without its time of receipt, and without an event time that equals it."""
    names = ("device_id", "site", "kind", "clock", "boot", "session", "seq", "uptime_s", "code", "firmware", "gateway")
    found = {name: getattr(row, name) for name in (*names, "metrics", "note", "event_time_ms")}
    if found["event_time_ms"] == row.received_at_ms:
        del found["event_time_ms"]
    return {name: value if isinstance(value, int) else str(value) for name, value in found.items() if value is not None}


def in_order(rows: list[Expected]) -> list[Expected]:
    return sorted(rows, key=lambda one: json.dumps(one, sort_keys=True))


@pytest.mark.parametrize("name", FORMATS)
def test_messages_of_a_format_become_their_rows(installation: Installation, name: str) -> None:
    expected = [row for one in FORMATS[name] for row in one.rows]
    devices = {row["device_id"] for row in expected}
    others = [row for other, messages in FORMATS.items() if other != name for one in messages for row in one.rows]
    expected += [row for row in others if row["device_id"] in devices]
    found = [content(row) for row in installation.rows() if row.device_id in devices]
    assert in_order(found) == in_order(expected)


def test_the_rows_take_devices_offline_by_the_wills_of_their_sessions(installation: Installation) -> None:
    rows = bronze.rows(installation.home)
    minute_ms = max(row.received_at_ms for row in rows) + 60_000  # longer than the grace period
    devices = outcome(rows, installation.home.deployment(), through_ms=minute_ms).devices
    modes = {name: str(devices[name].mode) for name in ("plug-1", "door", "pump", "plug-3", "livingroom")}
    assert modes == {"plug-1": "offline", "door": "offline", "pump": "online", "plug-3": "online", "livingroom": "online"}


def test_there_is_no_other_row(installation: Installation) -> None:
    ids = {row["device_id"] for messages in FORMATS.values() for one in messages for row in one.rows}
    rows = installation.rows()
    assert {row.device_id for row in rows} - {"lamp-2"} == ids
    assert len({row.digest for row in rows if row.device_id == "livingroom"}) == 4, "equal values are no copies"
    assert installation.quarantine() == []


def test_a_topic_with_a_space_costs_its_publisher_the_connection_and_nobody_else(installation: Installation) -> None:
    refused, accepted = SPACE
    assert installation.publish(refused) != 0
    assert installation.publish(accepted) == 0
    await_that(lambda: any(row.device_id == "lamp-2" for row in installation.rows()), what="the next message")
    assert [content(row) for row in installation.rows() if row.device_id.startswith("lamp")] == list(accepted.rows)
    log = (installation.home.logs / "bridge.log").read_text()
    assert "connected" in log and "connection to the broker lost" not in log


def test_a_wildcard_inside_of_a_level_is_refused(installation: Installation) -> None:
    file = installation.home.path / "wrong.toml"
    file.write_text('[[mapping]]\ntopic = "shelly-+/online"\nsite = "hall"\ndevice = "x"\nkind = "heartbeat"\n')
    done = CliRunner().invoke(app, ["map", "test", str(file), "shelly-1/online", "true"])
    assert done.exit_code == 1 and "a wildcard is a whole level" in str(done.exception)
