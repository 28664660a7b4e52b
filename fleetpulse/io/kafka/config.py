"""Which topics of which Kafka are taken, how its records become messages, and what its errors mean.

Rule 1: whatever record comes, it arrives: one whose key is no topic gets one by which it is found in quarantine.
Rule 2: a secret is in no ``repr`` and in no sentence.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, NamedTuple

from fleetpulse.core.errors import FleetError

SERVERS: Final = "bootstrap.servers"
TOPICS: Final = "topics"
MAX_KEY_BYTES: Final = 512  # two names of 128 bytes, a kind, and as much again
_LONGEST: Final = 300
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_SERVER: Final = re.compile(r"\S+:\d{1,5}")
_SECRET: Final = re.compile(r"password|secret|jaas|token|credential|\.key$", re.IGNORECASE)
_QUOTED: Final = re.compile(r'"([^"]*)"|\'([^\']*)\'')
_OURS: Final = frozenset(  # Spark sets them itself and refuses them, or they would break how a batch is read
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
_MEANINGS: Final = (  # what an error's text shows, and what it means; the first that fits
    (
        r"UnknownTopicOrPartition",
        "Kafka at {servers} has not all of the topics {topics}; make them, or correct the setting kafka",
    ),
    (r"No resolvable bootstrap", "no address of Kafka is known for {servers}; correct bootstrap.servers in the setting kafka"),
    (
        r"TopicAuthorization|GroupAuthorization|Not authorized",
        "Kafka at {servers} does not let us read {topics}; give us the right to",
    ),
    (
        r"SaslAuthentication|IllegalSaslState|UnsupportedSaslMechanism|Authentication failed",
        "Kafka at {servers} refuses us: the authentication failed; correct sasl.* and security.protocol in the setting kafka",
    ),
    (
        r"SslAuthentication|SSLHandshake|SSL handshake",
        "the secured line to Kafka at {servers} fails: check ssl.* in the setting kafka",
    ),
    (
        r"JAAS config|LoginException",
        "sasl.jaas.config in the setting kafka cannot be read; write it as Kafka's documentation says",
    ),
    (_SILENCE, "no answer from Kafka at {servers}"),
)
_LOST: Final = re.compile(r"KAFKA_DATA_LOSS|[Dd]ata may (have been|be) lost|OffsetOutOfRange")


class Record(NamedTuple):
    """A record as Kafka has it.

    Attributes:
        at: its timestamp in Kafka, in microseconds.
        topic, partition, offset: where it stands.
        key, value: its bytes; None where it has none.
    """

    at: int
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """Where Kafka is, what is taken from it, and what its clients are told besides.

    Attributes:
        servers: ``host:port``, separated by commas.
        topics: which.
        client: further options of Kafka's own clients; secrets are among them.
    """

    servers: str
    topics: tuple[str, ...]
    client: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    def __str__(self) -> str:
        """Return it as people write it, without the client's options."""
        return f"{', '.join(self.topics)} of Kafka at {self.servers}"

    def masked(self, text: str) -> str:
        """Return a text without the secrets that are among the options."""
        for secret in sorted(self._secrets(), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def _secrets(self) -> set[str]:
        values = [value for name, value in self.client.items() if _SECRET.search(name)]
        quoted = [part for value in values for pair in _QUOTED.findall(value) for part in pair]
        return {text for text in (*values, *quoted) if len(text) > 2}

    def meaning(self, error: str) -> str:
        """Say in one sentence what an error of Spark or Kafka means.

        Args:
            error: its text, with the causes that the JVM names.
        """
        for pattern, sentence in _MEANINGS:
            if re.search(pattern, error):
                return sentence.format(servers=self.servers, topics=", ".join(self.topics))
        causes = re.findall(r"Caused by: (.+)", error) or error.strip().splitlines() or ["it said nothing"]
        return f"reading {self} failed: {self.masked(causes[-1].strip())[:_LONGEST]}"


def parse_kafka(options: Mapping[str, str]) -> KafkaOptions:
    """Read the setting ``kafka``.

    Args:
        options: ``bootstrap.servers``, ``topics``, and options of Kafka's clients, with or without ``kafka.`` before them.

    Raises:
        FleetError: with all its faults; no value of an option is among them.
    """
    given = {name.removeprefix("kafka."): value for name, value in options.items()}
    servers = [server.strip() for server in given.pop(SERVERS, "").split(",") if server.strip()]
    topics = tuple(dict.fromkeys(topic.strip() for topic in given.pop(TOPICS, "").split(",") if topic.strip()))
    faults: list[str] = []
    if not servers or not all(_SERVER.fullmatch(server) for server in servers):
        faults.append(f'{SERVERS} is host:port, or several separated by commas; write such as "kafka.example:9092"')
    if not topics or not all(_TOPIC.fullmatch(topic) for topic in topics):
        faults.append(f'{TOPICS} names topics of Kafka, separated by commas; write such as "fleet"')
    if ours := sorted(_OURS & set(given)):
        faults.append(f"{', '.join(ours)}: set by us; leave out what is")
    if faults:
        raise FleetError(
            "the setting kafka has faults:\n" + "\n".join(f"  {fault}" for fault in faults), code="kafka-setting-faulty"
        )
    return KafkaOptions(",".join(servers), topics, given)


def is_loss(error: str) -> bool:
    """Whether an error says that Kafka deleted records that were not read yet."""
    return _LOST.search(error) is not None


def is_silence(error: str) -> bool:
    """Whether an error says that nobody answers: Kafka may be gone, or the way to it."""
    return re.search(_SILENCE, error) is not None


def topic_of(record: Record) -> str:
    """Return the topic of the message that a record becomes.

    Its key, where that is one as connectors from MQTT write it; else one that says where it stands, and ends in its key
    where that is a name, such as a device's: a mapping can take it in.
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
    """Put the records of a batch in order: by time in Kafka, but those of a partition as they stand there.

    A producer's clock may run backwards: a record counts as no earlier than those before it in its partition.
    """
    newest: dict[tuple[str, int], int] = {}
    timed: list[tuple[tuple[int, str, int, int], Record]] = []
    for record in sorted(records, key=itemgetter(1, 2, 3)):
        place = (record.topic, record.partition)
        newest[place] = max(record.at, newest.get(place, record.at))
        timed.append(((newest[place], *place, record.offset), record))
    timed.sort(key=itemgetter(0))
    return [record for _, record in timed]


class Canaries:
    """Canaries under way. They do not go through Kafka: they wait until all that was there when they were sent has come."""

    def __init__(self, limit: int = 1_000) -> None:
        self._limit = limit
        self._waiting: list[tuple[int, str, bytes]] = []

    def send(self, topic: str, payload: bytes, now_ms: int) -> None:
        """Take one; where there are too many, the oldest is lost."""
        self._waiting = [*self._waiting[1 - self._limit :], (now_ms, topic, payload)]

    def returned(self, looked_ms: int) -> list[tuple[str, bytes]]:
        """Return those that were sent before ``looked_ms``, when a look at Kafka began that found nothing that we have not."""
        back = [(topic, payload) for sent_ms, topic, payload in self._waiting if sent_ms < looked_ms]
        self._waiting = [one for one in self._waiting if one[0] >= looked_ms]
        return back

    def clear(self) -> None:
        """Forget them: the connection is lost."""
        self._waiting = []
