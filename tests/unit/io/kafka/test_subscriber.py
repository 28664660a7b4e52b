"""Kafka as a way in, without a JVM: keys and topics, order, canaries, options, and the bridge that takes from such a line."""

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.messages.decode import Rejection, decode
from fleetpulse.core.messages.mapping import decode_mapped, parse_mappings
from fleetpulse.core.rows import KAFKA, Origin, Row
from fleetpulse.io.home.home import Home, bridge_job
from fleetpulse.io.ingest.segments import list_segments, read_segment
from fleetpulse.io.kafka.config import MAX_KEY_BYTES, Canaries, Record, in_order, is_loss, is_silence, parse_kafka, topic_of
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.subscriber import Arrived
from fleetpulse.settings import Settings, load_settings
from streaming.bridge.bridge import Bridge, BridgeSettings
from tests.support.fake_source import Records
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
LOGIN = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="who" password="hush-hush";'
NOW = 1_700_000_000_000


def record(key: bytes | None, at: int = 0, partition: int = 3, offset: int = 0) -> Record:
    return Record(at, "plant", partition, offset, key, b"{}")


# ---- what a record becomes


def test_a_key_that_is_a_topic_is_the_topic() -> None:
    assert topic_of(record(b"fleet/oslo/d1/heartbeat")) == "fleet/oslo/d1/heartbeat"
    assert topic_of(record("zigbee/küche".encode())) == "zigbee/küche"


def test_a_key_that_is_a_name_stands_behind_the_place() -> None:
    assert topic_of(record(b"d1")) == "kafka/plant/3/d1"


@pytest.mark.parametrize("key", [None, b"", b"\xff\xfe", b"a/b\x00", b"fleet/" + b"x" * MAX_KEY_BYTES])
def test_a_record_without_a_topic_arrives_and_is_refused_for_its_topic(key: bytes | None) -> None:
    assert topic_of(record(key)) == "kafka/plant/3"
    refused = decode(topic_of(record(key)), b"{}", NOW)
    assert isinstance(refused, Rejection) and refused.reason == "topic"


@given(st.binary(max_size=600))
def test_whatever_key_comes_its_topic_is_short_and_printable(key: bytes) -> None:
    topic = topic_of(record(key))
    assert topic.isprintable() and 1 <= len(topic.encode()) <= MAX_KEY_BYTES + 300


def test_foreign_records_are_mapped_as_foreign_topics_are() -> None:
    mapping = {"topic": "kafka/plant/+/{device}", "site": "oslo", "kind": "telemetry"}
    row = decode_mapped(parse_mappings({"mapping": [mapping]}), topic_of(record(b"d1")), b"{}", NOW, Origin.MQTT)
    assert isinstance(row, Row) and (row.device_id, row.site) == ("d1", "oslo")


# ---- order


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=40), st.randoms())
def test_a_partition_keeps_its_order_and_time_orders_partitions(said: list[tuple[int, int]], random: Random) -> None:
    records = [record(None, at, partition, offset) for offset, (at, partition) in enumerate(said)]
    mixed = list(records)
    random.shuffle(mixed)
    ordered = in_order(mixed)
    assert sorted(ordered) == sorted(records)
    for partition in range(4):
        offsets = [one.offset for one in ordered if one.partition == partition]
        assert offsets == sorted(offsets)


def test_records_of_several_partitions_are_in_order_of_time() -> None:
    found = in_order([record(None, 5, 0, 0), record(None, 9, 0, 1), record(None, 7, 1, 0), record(None, 6, 1, 1)])
    assert [(one.partition, one.offset) for one in found] == [(0, 0), (1, 0), (1, 1), (0, 1)]


# ---- canaries


def test_a_canary_comes_back_with_a_look_that_began_after_it_was_sent() -> None:
    canaries = Canaries()
    canaries.send("t", b"1", 10)
    assert canaries.take_returned(9) == [] and canaries.take_returned(10) == [], "that look may have come before it"
    canaries.send("t", b"2", 20)
    assert canaries.take_returned(11) == [("t", b"1")]
    assert canaries.take_returned(30) == [("t", b"2")]
    assert canaries.take_returned(40) == []


def test_a_clock_that_is_set_back_holds_no_later_canary_up() -> None:
    canaries = Canaries()
    canaries.send("t", b"ahead", 9_000)
    canaries.send("t", b"after", 100)
    assert canaries.take_returned(101) == [("t", b"after")]


def test_canaries_that_do_not_come_back_are_bounded() -> None:
    canaries = Canaries(limit=3)
    for number in range(9):
        canaries.send("t", str(number).encode(), number)
    assert [payload for _, payload in canaries.take_returned(100)] == [b"6", b"7", b"8"]
    canaries.send("t", b"x", 1)
    canaries.clear()
    assert canaries.take_returned(100) == []


# ---- options


def test_options_are_those_of_kafka_with_or_without_its_name_before_them() -> None:
    options = parse_kafka({"bootstrap.servers": "a:1, b:2", "topics": "x,y,x", "kafka.client.id": "us"})
    assert (options.servers, options.topics, options.client) == ("a:1,b:2", ("x", "y"), {"client.id": "us"})


def test_all_faults_of_the_options_are_said_without_a_value() -> None:
    with refused("kafka-setting-faulty") as caught:
        parse_kafka({"bootstrap.servers": "nobody", "group.id": "g", "sasl.jaas.config": LOGIN})
    assert all(word in str(caught.value) for word in ("bootstrap.servers", "topics", "group.id"))
    assert "hush" not in str(caught.value)


def test_no_secret_is_shown() -> None:
    told = {"bootstrap.servers": "a:1", "topics": "x", "sasl.jaas.config": LOGIN, "ssl.key.password": "open-sesame"}
    options = parse_kafka(told)
    said = options.explain("Caused by: java.lang.Exception: no entry for hush-hush and open-sesame")
    shown = f"{options!r} {options} {Settings(kafka=told)!r} {said}"
    assert "hush" not in shown and "sesame" not in shown and "***" in said


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("Caused by: x.errors.UnknownTopicOrPartitionException: This server", "lacks some of the topics x"),
        ("Caused by: x.TimeoutException: Timed out waiting for a node assignment.", "no answer from Kafka at a:1"),
        ("Caused by: org.apache.kafka.common.errors.SaslAuthenticationException: no", "authentication failed"),
        ("Caused by: x.ConfigException: No resolvable bootstrap urls given in bootstrap.servers", "cannot be resolved"),
        ("[STREAM_FAILED] it\n  Caused by: a.B: first\n  Caused by: a.C: second", "a.C: second"),
        ("", "the error has no text"),
    ],
)
def test_an_error_is_one_sentence(error: str, words: str) -> None:
    said = parse_kafka({"bootstrap.servers": "a:1", "topics": "x"}).explain(error)
    assert words in said and "\n" not in said


def test_what_kafka_deleted_is_told_from_other_errors() -> None:
    assert is_loss("[KAFKA_DATA_LOSS.COULD_NOT_READ_OFFSET_RANGE] Some data may have been lost")
    assert not is_loss("Caused by: x.TimeoutException: Timed out")
    assert is_silence("Caused by: x.TimeoutException: Timed out") and not is_silence("Caused by: x.SaslAuthenticationException")


# ---- settings and home


def test_the_settings_take_kafka_as_toml_reads_it(tmp_path: Path) -> None:
    text = '[kafka]\nbootstrap.servers = "a:1"\ntopics = ["x", "y"]\nsecurity.protocol = "SSL"\n'
    (tmp_path / "settings.toml").write_text(text)
    settings = load_settings(tmp_path)
    assert settings.kafka == {"bootstrap.servers": "a:1", "topics": "x,y", "security.protocol": "SSL"}
    assert settings.all_bridges() == {KAFKA: ()}


def test_a_fault_among_the_options_of_kafka_shows_no_value(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('kafka = "hush-hush"\n')
    with refused("settings-faulty") as caught:
        load_settings(tmp_path)
    assert "kafka" in str(caught.value) and "hush" not in str(caught.value)


def test_no_bridge_of_sites_takes_the_name_of_kafkas(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('[bridges]\nkafka = ["oslo"]\n')
    with refused("settings-faulty"):
        load_settings(tmp_path)


def test_a_home_that_takes_from_kafka_stays_so(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(None)
    home.divide({KAFKA: ()})
    assert KAFKA in home.bridges() and bridge_job(KAFKA) == "bridge-kafka"
    with refused("kafka-setting-missing"):
        home.divide({})


# ---- the bridge


def test_the_bridge_takes_from_any_line_and_passes_over_no_site_of_another(tmp_path: Path) -> None:
    line = Records()
    where = tmp_path / "segments", None, tmp_path / "run" / "status.json"
    others = {"bridge-1": tmp_path / "other"}
    bridge = Bridge(BridgeSettings(*where, BrokerAddress("h", 1), "", bridge=KAFKA, others=others, source_factory=lambda: line))
    bridge.step()
    forged = json.dumps({"bridge": KAFKA, "nonce": "1-1-0"}).encode()
    sent = [("fleet/oslo/d/heartbeat", b"{}"), (f"fleet/_/{KAFKA}/tick", forged)]
    line.coming = [*(Arrived(*one, False, (1, number)) for number, one in enumerate(sent, 1)), *line.canaries]
    bridge.step()
    bridge.close()
    rows = [row for _, path in list_segments(where[0]) for row in read_segment(path).to_pylist()]
    assert [(row["topic"], row["origin"]) for row in rows] == [
        ("fleet/oslo/d/heartbeat", "mqtt"),
        (f"fleet/_/{KAFKA}/tick", "mqtt"),
        (f"fleet/_/{KAFKA}/tick", "bridge"),
    ]
    assert [token for token in line.acknowledged if token] == [(1, 1), (1, 2)]
