"""Kafka setting, conversion of records to messages, and explanations of errors.

Rule 1: every record becomes a message. A record whose key is not a topic gets a topic that
identifies the record in quarantine.
Rule 2: secrets appear in no ``repr`` and in no message.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, NamedTuple

from fleetpulse.core.errors import FleetError
from fleetpulse.core.operations.secret_files import SECRET_NAME

SERVERS: Final = "bootstrap.servers"
TOPICS: Final = "topics"
MAX_KEY_BYTES: Final = 512  # two names of 128 bytes, a kind, and a reserve of the same size
_LONGEST: Final = 300
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_SERVER: Final = re.compile(r"\S+:\d{1,5}")
_QUOTED: Final = re.compile(r'"([^"]*)"|\'([^\']*)\'')
_RESERVED_OPTIONS: Final = frozenset(  # Spark sets and rejects them, or they would break the reading of a batch
    {
        "auto.offset.reset",
        "enable.auto.commit",
        "group.id",
        "interceptor.classes",
        "isolation.level",
        "key.deserializer",
        "max.poll.records",
        "value.deserializer",
    }
)
_SILENCE: Final = r"TimeoutException|Timed out|DisconnectException|Connection refused"
_MEANINGS: Final = (  # pattern in an error's text, and its explanation; the first match counts
    (
        r"UnknownTopicOrPartition",
        "Kafka at {servers} lacks some of the topics {topics}; create them, or correct the setting kafka",
    ),
    (
        r"No resolvable bootstrap",
        "the addresses {servers} of Kafka cannot be resolved; correct bootstrap.servers in the setting kafka",
    ),
    (
        r"TopicAuthorization|GroupAuthorization|Not authorized",
        "Kafka at {servers} denies the bridge read access to {topics}; grant it in Kafka's ACLs",
    ),
    (
        r"SaslAuthentication|IllegalSaslState|UnsupportedSaslMechanism|Authentication failed",
        "authentication failed at Kafka ({servers}); correct sasl.* and security.protocol in the setting kafka",
    ),
    (
        r"SslAuthentication|SSLHandshake|SSL handshake",
        "the TLS connection to Kafka at {servers} failed; correct ssl.* in the setting kafka",
    ),
    (
        r"JAAS config|LoginException",
        "sasl.jaas.config in the setting kafka is invalid; write it as in Kafka's documentation",
    ),
    (_SILENCE, "no answer from Kafka at {servers}"),
)
_LOST: Final = re.compile(r"KAFKA_DATA_LOSS|[Dd]ata may (have been|be) lost|OffsetOutOfRange")


class Record(NamedTuple):
    """Kafka record.

    Attributes:
        timestamp_us: timestamp in Kafka, epoch microseconds.
        topic: Kafka topic.
        partition: partition of the topic.
        offset: offset in the partition.
        key: bytes of the key; None if the record has no key.
        value: bytes of the value; None if the record has no value.
    """

    timestamp_us: int
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """Servers, topics and client options of the Kafka source.

    Attributes:
        servers: bootstrap servers ``host:port``, separated by commas.
        topics: topics to subscribe to.
        client: further options of the Kafka client; they include secrets.
    """

    servers: str
    topics: tuple[str, ...]
    client: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    def __str__(self) -> str:
        """Return topics and servers as text, without the client options."""
        return f"{', '.join(self.topics)} of Kafka at {self.servers}"

    def masked(self, text: str) -> str:
        """Replace the secrets of the client options in a text."""
        for secret in sorted(self._secrets(), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def _secrets(self) -> set[str]:
        values = [value for name, value in self.client.items() if SECRET_NAME.search(name)]
        quoted = [part for value in values for pair in _QUOTED.findall(value) for part in pair]
        return {text for text in (*values, *quoted) if len(text) > 2}

    def explain(self, error: str) -> str:
        """Explain an error of Spark or Kafka in one sentence.

        Args:
            error: text of the error, with the causes from the JVM.
        """
        for pattern, sentence in _MEANINGS:
            if re.search(pattern, error):
                return sentence.format(servers=self.servers, topics=", ".join(self.topics))
        causes = re.findall(r"Caused by: (.+)", error) or error.strip().splitlines() or ["the error has no text"]
        return f"reading {self} failed: {self.masked(causes[-1].strip())[:_LONGEST]}"


def parse_kafka(options: Mapping[str, str]) -> KafkaOptions:
    """Parse the setting ``kafka``.

    Args:
        options: ``bootstrap.servers``, ``topics``, and options of the Kafka client, with or without
            the prefix ``kafka.``.

    Raises:
        FleetError: the setting is invalid; the error lists all faults, without values of options.
    """
    remaining = {name.removeprefix("kafka."): value for name, value in options.items()}
    servers = [server.strip() for server in remaining.pop(SERVERS, "").split(",") if server.strip()]
    topics = tuple(dict.fromkeys(topic.strip() for topic in remaining.pop(TOPICS, "").split(",") if topic.strip()))
    faults: list[str] = []
    if not servers or not all(_SERVER.fullmatch(server) for server in servers):
        faults.append(f'{SERVERS} must be host:port, or several separated by commas; for example "kafka.example:9092"')
    if not topics or not all(_TOPIC.fullmatch(topic) for topic in topics):
        faults.append(f'{TOPICS} must be names of Kafka topics, separated by commas; for example "fleet"')
    if reserved := sorted(_RESERVED_OPTIONS & set(remaining)):
        faults.append(f"{', '.join(reserved)}: set by fleetpulse; remove from the setting")
    if faults:
        raise FleetError(
            "the setting kafka is invalid; correct these faults:\n" + "\n".join(f"  {fault}" for fault in faults),
            code="kafka-setting-faulty",
        )
    return KafkaOptions(",".join(servers), topics, remaining)


def is_loss(error: str) -> bool:
    """Return whether an error reports that Kafka deleted unread records."""
    return _LOST.search(error) is not None


def is_silence(error: str) -> bool:
    """Return whether an error reports that Kafka does not answer."""
    return re.search(_SILENCE, error) is not None


def topic_of(record: Record) -> str:
    """Return the topic of the message for a record.

    If the key is a topic, as written by MQTT connectors, return the key. Otherwise return
    ``kafka/<topic>/<partition>``, followed by the key if it is a name such as a device id.
    A mapping can decode messages of such a topic.
    """
    where = f"kafka/{record.topic}/{record.partition}"
    if not record.key or len(record.key) > MAX_KEY_BYTES:
        return where
    try:
        key = record.key.decode()
    except UnicodeDecodeError:
        return where
    if not key.isprintable():
        return where
    return key if "/" in key else f"{where}/{key}"


def in_order(records: Iterable[Record]) -> list[Record]:
    """Sort the records of a batch by Kafka time, keeping the order of each partition.

    The clock of a producer may run backwards. A record therefore counts as no earlier than the
    records before it in its partition.
    """
    newest: dict[tuple[str, int], int] = {}
    timed: list[tuple[tuple[int, str, int, int], Record]] = []
    for record in sorted(records, key=itemgetter(1, 2, 3)):
        place = (record.topic, record.partition)
        newest[place] = max(record.timestamp_us, newest.get(place, record.timestamp_us))
        timed.append(((newest[place], *place, record.offset), record))
    timed.sort(key=itemgetter(0))
    return [record for _, record in timed]


class Canaries:
    """Canaries of the Kafka source, which do not pass through Kafka.

    A canary returns when all records that were in Kafka when it was sent have been received.
    """

    def __init__(self, limit: int = 1_000) -> None:
        self._limit = limit
        self._waiting: list[tuple[int, str, bytes]] = []

    def send(self, topic: str, payload: bytes, now_ms: int) -> None:
        """Add a canary; drop the oldest if there are too many."""
        self._waiting = [*self._waiting[1 - self._limit :], (now_ms, topic, payload)]

    def take_returned(self, polled_ms: int) -> list[tuple[str, bytes]]:
        """Return and remove the canaries that were sent before ``polled_ms``.

        Args:
            polled_ms: start of a poll of Kafka that found no new records, epoch milliseconds.
        """
        back = [(topic, payload) for sent_ms, topic, payload in self._waiting if sent_ms < polled_ms]
        self._waiting = [one for one in self._waiting if one[0] >= polled_ms]
        return back

    def clear(self) -> None:
        """Drop all canaries, because the connection is lost."""
        self._waiting = []
