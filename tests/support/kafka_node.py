"""Single-node Kafka for tests, from Maven artifacts, on the loopback."""

import os
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pyspark

from fleetpulse.io.spark.jars import KAFKA_JARS, Jar, resolve_jars
from fleetpulse.io.spark.java import find_java
from fleetpulse.io.system.ports import free_port
from fleetpulse.paths import ROOT

# JARs of the Kafka server, in addition to those of the Kafka client and of pyspark.
NODE_JARS: Final = (
    Jar("net.sourceforge.argparse4j", "argparse4j", "0.7.0", "65ceb669d88f63306c680f8088bbf765bbca72d288a61a03703000076c3d3f56"),
    Jar("commons-validator", "commons-validator", "1.10.1", "ed74711a78d793ca37f6075e4a1e93d107233dfd20d0bb17e32bad88d38e56aa"),
    Jar("net.sf.jopt-simple", "jopt-simple", "5.0.4", "df26cc58f235f477db07f753ba5a3ab243ebe5789d9f89ecf68dd62ea9a66c28"),
    Jar(
        "org.apache.kafka", "kafka-group-coordinator", "3.9.2", "d4d57f0955895cc38381f346f5ff7eba487afafa5ba264804af18393305b32fd"
    ),
    Jar(
        "org.apache.kafka",
        "kafka-group-coordinator-api",
        "3.9.2",
        "bd903ba506c8309401a331ef1b826612d1cb95862879551031428da5cf50eab6",
    ),
    Jar("org.apache.kafka", "kafka-metadata", "3.9.2", "ffe970aee12f00df4b0162f31c719df7c412f9207c166a74cef6611be25a255e"),
    Jar("org.apache.kafka", "kafka-raft", "3.9.2", "f897533828e55ac466a5b183a25dccbe5a7b97c02162dac38e25338feddfe422"),
    Jar("org.apache.kafka", "kafka-server", "3.9.2", "4f8667dbd664c4b0906e05499cfdc5f558f14c098b77fa6c09656cceb62a63ef"),
    Jar("org.apache.kafka", "kafka-server-common", "3.9.2", "0374b3f13c3c4b7fd446d35df1ccb0c60931ea27d4972b4de1bb1d548a87f5b2"),
    Jar("org.apache.kafka", "kafka-storage", "3.9.2", "8a3d7b67dfcd34b1334d4994ed4106ba9c9b37ebcbb177ac47ff44050e8ab84b"),
    Jar("org.apache.kafka", "kafka-storage-api", "3.9.2", "565ab8540b50c7f00ea62c77a6639237ed3a80550245be70dc733f157cd280d6"),
    Jar("org.apache.kafka", "kafka-tools-api", "3.9.2", "501ac034b93853c3dcba4b49e32c7c795de109a96b8ab6d59a9ab19e6ef11491"),
    Jar(
        "org.apache.kafka",
        "kafka-transaction-coordinator",
        "3.9.2",
        "d6ca25648111dfd11f76d3d0f7f51a9458784b645f4e56ce34fbc58d9c9d0296",
    ),
    Jar("org.apache.kafka", "kafka_2.13", "3.9.2", "dddf49b18c931301fece0048a76d6b0956c36c8b1d1fc721bfed318aa6ee3e4f"),
    Jar("com.yammer.metrics", "metrics-core", "2.2.0", "6b7a14a6f34c10f8683f7b5e2f39df0f07b58c7dff0e468ebbc713905c46979c"),
    Jar("org.pcollections", "pcollections", "4.0.1", "1f82766d7c3221930854033bebff5073ea46b43f27326074bbe15d148c18bfb3"),
    Jar(
        "org.scala-lang.modules",
        "scala-java8-compat_2.13",
        "1.0.2",
        "90d5b13656be93fb779b8d7c723efa2498a34af06273bb5204afb65f85a20c1b",
    ),
    Jar(
        "com.typesafe.scala-logging",
        "scala-logging_2.13",
        "3.9.5",
        "87a3017d3f43e6ace7566fe4c3d615134c6914ff871c8d64bb32ca1d996d0545",
    ),
)
CLUSTER: Final = "AAAAAAAAAAAAAAAAAAAAAA"
CONFIGURATION: Final = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{quorum}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{quorum}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={folder}
num.partitions=2
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
log.retention.check.interval.ms=1000
"""


class Node:
    """Kafka server that can be stopped and restarted.

    Args:
        folder: folder for its data; it must not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.quorum = (free_port("127.0.0.1", 0, OSError) for _ in range(2))
        jars = [str(path) for path in resolve_jars(jars=(*NODE_JARS, *KAFKA_JARS))]
        self.class_path = os.pathsep.join([*jars, str(Path(pyspark.__file__).parent / "jars" / "*")])
        self.configuration = folder / "server.properties"
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)
        text = CONFIGURATION.format(port=self.port, quorum=self.quorum, folder=folder / "data")
        self.configuration.write_text(text)
        done = subprocess.run(
            [*self.java(), "kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", self.configuration],
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")[-2_000:]

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def java(self, heap: str = "-Xmx256m") -> list[str]:
        log4j = ROOT / "infra" / "spark" / "log4j2.properties"
        return [
            str(find_java() / "bin" / "java"),
            heap,
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",  # the process lives for about a minute
            f"-Dlog4j2.configurationFile={log4j.as_uri()}",
            "-cp",
            self.class_path,
        ]

    def configure(self, **lines: object) -> None:
        """Add lines to the configuration, with effect from the next start on."""
        text = "".join(f"{name.replace('_', '.')}={value}\n" for name, value in lines.items())
        self.configuration.write_text(self.configuration.read_text() + text)

    def first_offset(self, topic: str) -> int:
        """Return the sum of the first retained offsets of the topic's partitions."""
        files: dict[Path, list[int]] = {}
        for path in (self.folder / "data").glob(f"{topic}-*/*.log"):
            files.setdefault(path.parent, []).append(int(path.stem))
        return sum(min(offsets) for offsets in files.values())

    def start(self) -> None:
        with (self.folder / "kafka.log").open("ab") as log:
            command = [*self.java(), "kafka.Kafka", str(self.configuration)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 120
        while not _answers(self.port):
            assert self.process.poll() is None, (self.folder / "kafka.log").read_text()[-2_000:]
            assert time.monotonic() < deadline_s, "Kafka did not start within two minutes"
            time.sleep(0.1)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Producer:
    """Kafka's console producer for a topic, which the first record creates.

    Args:
        node: Kafka server.
        topic: name of the topic.
    """

    def __init__(self, node: Node, topic: str) -> None:
        properties = ["parse.key=true", "key.separator=|", "null.marker=NULL"]
        command = [*node.java("-Xmx128m"), "kafka.tools.ConsoleProducer", "--bootstrap-server", node.servers, "--topic", topic]
        for one in properties:
            command += ["--property", one]
        with (node.folder / "producer.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def send(self, records: Iterable[tuple[str, str]]) -> None:
        """Send records of key and value; ``NULL`` stands for a null key or value."""
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{key}|{value}\n" for key, value in records).encode())
        self.process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the producer in order, after which all sent records are in Kafka."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            code = self.process.wait(30)
            assert code == 0 or error is not None, f"the producer ended with {code}"
        finally:
            self.process.kill()
            self.process.wait(10)


def _answers(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(0.5)
        return sock.connect_ex(("127.0.0.1", port)) == 0
