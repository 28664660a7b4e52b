"""Kafka source without a JVM: topics of records, order, canaries, options, home and bridge."""

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.messages.decode import Rejection, decode
from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.core.rows import KAFKA, Origin, Row
from fleetpulse.io.home.home import Home, bridge_job
from fleetpulse.io.ingest.payload_paths import compile_path
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


def record(key: bytes | None, timestamp_us: int = 0, partition: int = 3, offset: int = 0) -> Record:
    return Record(timestamp_us, "plant", partition, offset, key, b"{}")


# ---- topics of records


def test_record_key_that_is_a_topic_becomes_the_topic() -> None:
    assert topic_of(record(b"fleet/oslo/d1/heartbeat")) == "fleet/oslo/d1/heartbeat"
    assert topic_of(record("zigbee/küche".encode())) == "zigbee/küche"


def test_record_key_that_is_a_name_follows_the_partition() -> None:
    assert topic_of(record(b"d1")) == "kafka/plant/3/d1"


@pytest.mark.parametrize("key", [None, b"", b"\xff\xfe", b"a/b\x00", b"fleet/" + b"x" * MAX_KEY_BYTES])
def test_record_without_a_valid_key_is_rejected_for_its_topic(key: bytes | None) -> None:
    assert topic_of(record(key)) == "kafka/plant/3"
    rejection = decode(topic_of(record(key)), b"{}", NOW)
    assert isinstance(rejection, Rejection) and rejection.reason == "topic"


@given(st.binary(max_size=600))
def test_topic_of_any_record_key_is_short_and_printable(key: bytes) -> None:
    topic = topic_of(record(key))
    assert topic.isprintable() and 1 <= len(topic.encode()) <= MAX_KEY_BYTES + 300


def test_mappings_decode_records_of_foreign_formats() -> None:
    mapping = {"topic": "kafka/plant/+/{device}", "site": "oslo", "kind": "telemetry"}
    row = parse_mappings({"mapping": [mapping]}, compile_path).decode(topic_of(record(b"d1")), b"{}", NOW, Origin.MQTT)
    assert isinstance(row, Row) and (row.device_id, row.site) == ("d1", "oslo")


# ---- order


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=40), st.randoms())
def test_sorting_keeps_all_records_and_the_order_of_each_partition(stamps: list[tuple[int, int]], random: Random) -> None:
    records = [record(None, timestamp_us, partition, offset) for offset, (timestamp_us, partition) in enumerate(stamps)]
    mixed = list(records)
    random.shuffle(mixed)
    ordered = in_order(mixed)
    assert sorted(ordered) == sorted(records)
    for partition in range(4):
        offsets = [one.offset for one in ordered if one.partition == partition]
        assert offsets == sorted(offsets)


def test_records_of_several_partitions_are_sorted_by_time() -> None:
    found = in_order([record(None, 5, 0, 0), record(None, 9, 0, 1), record(None, 7, 1, 0), record(None, 6, 1, 1)])
    assert [(one.partition, one.offset) for one in found] == [(0, 0), (1, 0), (1, 1), (0, 1)]


# ---- canaries


def test_canary_returns_after_a_poll_that_started_after_it_was_sent() -> None:
    canaries = Canaries()
    canaries.send("t", b"1", 10)
    assert canaries.take_returned(9) == [] and canaries.take_returned(10) == [], "that poll may have started before the canary"
    canaries.send("t", b"2", 20)
    assert canaries.take_returned(11) == [("t", b"1")]
    assert canaries.take_returned(30) == [("t", b"2")]
    assert canaries.take_returned(40) == []


def test_clock_set_back_does_not_delay_later_canaries() -> None:
    canaries = Canaries()
    canaries.send("t", b"ahead", 9_000)
    canaries.send("t", b"after", 100)
    assert canaries.take_returned(101) == [("t", b"after")]


def test_number_of_unreturned_canaries_is_bounded() -> None:
    canaries = Canaries(limit=3)
    for number in range(9):
        canaries.send("t", str(number).encode(), number)
    assert [payload for _, payload in canaries.take_returned(100)] == [b"6", b"7", b"8"]
    canaries.send("t", b"x", 1)
    canaries.clear()
    assert canaries.take_returned(100) == []


# ---- options


def test_options_are_accepted_with_and_without_the_prefix_kafka() -> None:
    options = parse_kafka({"bootstrap.servers": "a:1, b:2", "topics": "x,y,x", "kafka.client.id": "us"})
    assert (options.servers, options.topics, options.client) == ("a:1,b:2", ("x", "y"), {"client.id": "us"})


def test_error_of_the_options_lists_all_faults_without_values() -> None:
    with refused("kafka-setting-faulty") as caught:
        parse_kafka({"bootstrap.servers": "nobody", "group.id": "g", "sasl.jaas.config": LOGIN})
    assert all(name in str(caught.value) for name in ("bootstrap.servers", "topics", "group.id"))
    assert "hush" not in str(caught.value)


def test_secrets_are_masked_in_every_text() -> None:
    setting = {"bootstrap.servers": "a:1", "topics": "x", "sasl.jaas.config": LOGIN, "ssl.key.password": "open-sesame"}
    options = parse_kafka(setting)
    explanation = options.explain("Caused by: java.lang.Exception: no entry for hush-hush and open-sesame")
    shown = f"{options!r} {options} {Settings(kafka=setting)!r} {explanation}"
    assert "hush" not in shown and "sesame" not in shown and "***" in explanation


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("Caused by: x.errors.UnknownTopicOrPartitionException: This server", "lacks some of the topics x"),
        ("Caused by: x.TimeoutException: Timed out waiting for a node assignment.", "no answer from Kafka at a:1"),
        ("Caused by: org.apache.kafka.common.errors.SaslAuthenticationException: no", "authentication failed"),
        ("Caused by: x.ConfigException: No resolvable bootstrap urls given in bootstrap.servers", "cannot be resolved"),
        ("[STREAM_FAILED] it\n  Caused by: a.B: first\n  Caused by: a.C: second", "a.C: second"),
        ("", "the error has no text"),
    ],
)
def test_error_is_explained_in_one_sentence(error: str, expected: str) -> None:
    explanation = parse_kafka({"bootstrap.servers": "a:1", "topics": "x"}).explain(error)
    assert expected in explanation and "\n" not in explanation


def test_loss_of_records_is_distinguished_from_other_errors() -> None:
    assert is_loss("[KAFKA_DATA_LOSS.COULD_NOT_READ_OFFSET_RANGE] Some data may have been lost")
    assert not is_loss("Caused by: x.TimeoutException: Timed out")
    assert is_silence("Caused by: x.TimeoutException: Timed out") and not is_silence("Caused by: x.SaslAuthenticationException")


# ---- settings and home


def test_settings_accept_kafka_as_a_toml_table(tmp_path: Path) -> None:
    text = '[kafka]\nbootstrap.servers = "a:1"\ntopics = ["x", "y"]\nsecurity.protocol = "SSL"\n'
    (tmp_path / "settings.toml").write_text(text)
    settings = load_settings(tmp_path)
    assert settings.kafka == {"bootstrap.servers": "a:1", "topics": "x,y", "security.protocol": "SSL"}
    assert settings.all_bridges() == {KAFKA: ()}


def test_error_of_the_setting_kafka_shows_no_value(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('kafka = "hush-hush"\n')
    with refused("settings-faulty") as caught:
        load_settings(tmp_path)
    assert "kafka" in str(caught.value) and "hush" not in str(caught.value)


def test_bridge_name_kafka_is_reserved(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('[bridges]\nkafka = ["oslo"]\n')
    with refused("settings-faulty"):
        load_settings(tmp_path)


def test_home_that_reads_kafka_requires_the_setting_kafka_later(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(None)
    home.divide({KAFKA: ()})
    assert KAFKA in home.bridges() and bridge_job(KAFKA) == "bridge-kafka"
    with refused("kafka-setting-missing"):
        home.divide({})


# ---- the bridge


def test_bridge_with_another_source_takes_the_messages_of_every_site(tmp_path: Path) -> None:
    source = Records()
    paths = tmp_path / "segments", None, tmp_path / "run" / "status.json"
    others = {"bridge-1": tmp_path / "other"}
    bridge = Bridge(BridgeSettings(*paths, BrokerAddress("h", 1), "", bridge=KAFKA, others=others, source_factory=lambda: source))
    bridge.step()
    forged = json.dumps({"bridge": KAFKA, "nonce": "1-1-0"}).encode()
    sent = [("fleet/oslo/d/heartbeat", b"{}"), (f"fleet/_/{KAFKA}/tick", forged)]
    source.coming = [*(Arrived(*one, False, (1, number)) for number, one in enumerate(sent, 1)), *source.canaries]
    bridge.step()
    bridge.close()
    rows = [row for _, path in list_segments(paths[0]) for row in read_segment(path).to_pylist()]
    assert [(row["topic"], row["origin"]) for row in rows] == [
        ("fleet/oslo/d/heartbeat", "mqtt"),
        (f"fleet/_/{KAFKA}/tick", "mqtt"),
        (f"fleet/_/{KAFKA}/tick", "bridge"),
    ]
    assert [token for token in source.acknowledged if token] == [(1, 1), (1, 2)]
