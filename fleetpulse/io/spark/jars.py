"""JARs of Delta and Spark's Kafka source, pinned by version and checksum.

They are downloaded once from Maven Central; later starts need no network.
"""

import hashlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.spark.hadoop_settings import settings_jar
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.paths import cache_dir

MAVEN_CENTRAL: Final = "https://repo1.maven.org/maven2"
_TRIES: Final = 3
_TIMEOUT_S: Final = 60  # without a received byte
_DEADLINE_S: Final = 600  # for one JAR, so that a very slow download ends too
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Jar:
    """Pinned artifact of Maven Central.

    Attributes:
        group: Maven group id.
        artifact: Maven artifact id.
        version: pinned version.
        sha256: SHA-256 of the JAR, in hexadecimal digits.
    """

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def name(self) -> str:
        """File name."""
        return f"{self.artifact}-{self.version}.jar"

    @property
    def path(self) -> str:
        """Path below the URL of a Maven repository."""
        return f"{self.group.replace('.', '/')}/{self.artifact}/{self.version}/{self.name}"


# Transitive dependencies of delta-spark's POM, without the JARs that pyspark 4.2.0 includes. The
# tables of a home do not use the kernel and catalog JARs, but the connector references their
# classes: without them, a rare code path would fail with NoClassDefFoundError. RoaringBitmap's
# "shims" is left out: it belongs to an older RoaringBitmap than the one in pyspark.
JARS: Final = (
    Jar("io.delta", "delta-spark_4.2_2.13", "4.4.0", "27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead"),
    Jar("io.delta", "delta-storage", "4.4.0", "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc"),
    Jar("io.delta", "delta-kernel-api", "4.4.0", "ee9b5a14ac3b7efdff4d61a58478fe8eb0e5a3fbca43889dca7290795fe79a11"),
    Jar("io.delta", "delta-kernel-defaults", "4.4.0", "225c975199e4718b38ee5b7e6da7f19e9585024262b2cec2656b32151a856b0b"),
    Jar(
        "io.delta",
        "delta-kernel-unitycatalog",
        "4.4.0",
        "cea22dfb4ac562b3cd27bf652697750e8336009d73fb06631363aaaad5345ffa",
    ),
    Jar(
        "io.unitycatalog",
        "unitycatalog-client",
        "0.6.0",
        "48257499a86b801a3e2372cec55ac226ca1c1c7eabe5c118e7302f29a1fdbc19",
    ),
    Jar(
        "io.unitycatalog",
        "unitycatalog-hadoop",
        "0.6.0",
        "c47b63c961c87102b9e1d63809a0915ba4c86b7652f57c8d39ca3a05b441a150",
    ),
    Jar(
        "com.fasterxml.jackson.datatype",
        "jackson-datatype-jdk8",
        "2.13.5",
        "e58761751fea8a00dc626aae1c5f1be38c5cfd487aeb333d933a4ab5f5a73c55",
    ),
    Jar(
        "javax.annotation",
        "javax.annotation-api",
        "1.3.2",
        "e04ba5195bcd555dc95650f7cc614d151e4bcd52d29a10b8aa2197f3ab89ab9b",
    ),
)

# Transitive dependencies of spark-sql-kafka's POM, without the JARs that pyspark 4.2.0 includes.
# The token provider 4.2.0 is not on Maven Central. Version 4.0.0 is compatible: every class and
# method that the two JARs reference in each other and in Spark 4.2.0 exists.
KAFKA_JARS: Final = (
    Jar(
        "org.apache.spark",
        "spark-sql-kafka-0-10_2.13",
        "4.2.0",
        "64539c45e5d39f7ddb747312c239f38f5208d08c1a0ddf7d70beb2fbd9373705",
    ),
    Jar(
        "org.apache.spark",
        "spark-token-provider-kafka-0-10_2.13",
        "4.0.0",
        "f2be3b76f9e6cbe63379d4e4e0dc14f59dbf056ae2ad16ff15ac108004c86767",
    ),
    Jar("org.apache.kafka", "kafka-clients", "3.9.2", "014b4ef36884478a932641818b080c36a8f8e2e92dc771e800c9d2694f4f83d8"),
    Jar("org.apache.commons", "commons-pool2", "2.13.1", "f77a5060d6936a9144023584232f9de3f2248f1abfe156e9d31795f18770674f"),
)


def resolve_jars(folder: Path | None = None, jars: Sequence[Jar] = JARS) -> list[Path]:
    """Return the paths of the JARs; download the missing ones to the cache.

    Several processes can call this at the same time.

    Args:
        folder: folder of the JARs; the cache of the project by default.
        jars: JARs to resolve.

    Raises:
        FleetError: a JAR cannot be downloaded, or its checksum differs.
    """
    folder = folder or cache_dir() / "jars"
    if absent := absent_jars(folder, jars):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(max_workers=4) as pool:  # the time is spent waiting for the network
            under_way = [pool.submit(_install, folder, jar) for jar in absent]
            try:
                for one in under_way:
                    one.result()
            finally:
                pool.shutdown(cancel_futures=True)  # one failed download is enough to fail
    return [folder / jar.name for jar in jars]


def require_jars(folder: Path | None = None, jars: Sequence[Jar] = JARS) -> None:
    """Check that the JARs are in the cache, with their checksums; download nothing.

    Raises:
        FleetError: a JAR is missing, cannot be read, or differs.
    """
    folder = folder or cache_dir() / "jars"
    if absent := absent_jars(folder, jars):
        raise FleetError(
            f'{len(absent)} of {len(jars)} JARs are missing in "{folder}", such as {absent[0].name}; run: ./fleet fetch',
            code="jar-missing",
        )
    for jar in jars:
        path = folder / jar.name
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != jar.sha256:
            raise FleetError(
                f'the checksum of "{path}" differs: expected SHA-256 {jar.sha256}; got {found}; remove the file, and run: '
                f"./fleet fetch",
                code="jar-checksum-differs",
            )


def own_jars() -> list[Path]:
    """Return the JARs that come before Spark's in the class path of a session.

    Raises:
        FleetError: a pinned JAR cannot be downloaded, or its checksum differs.
    """
    jars = resolve_jars()
    settings = settings_jar(spark_home(), cache_dir() / "jars")
    return jars if settings is None else [settings, *jars]


def jars_of_spark() -> list[Path]:
    """Return all JARs of a session's class path, in order; see `own_jars` for errors."""
    return [*own_jars(), *sorted((spark_home() / "jars").glob("*.jar"))]


def spark_home() -> Path:
    """Return the folder of the pinned Spark, at a tenth of the cost of an import."""
    found = find_spec("pyspark")
    assert found is not None and found.origin is not None, "pyspark is missing; it is among the pinned requirements"
    return Path(found.origin).parent


def absent_jars(folder: Path | None = None, jars: Sequence[Jar] = JARS) -> list[Jar]:
    """Return the JARs that are not in the cache."""
    folder = folder or cache_dir() / "jars"
    return [jar for jar in jars if not (folder / jar.name).exists()]


def _install(folder: Path, jar: Jar) -> None:
    """Download, verify and then rename a JAR, so that later starts need not verify it."""
    content = _fetch(jar)
    found = hashlib.sha256(content).hexdigest()
    if found != jar.sha256:
        raise FleetError(
            f"the checksum of {jar.name} differs: expected SHA-256 {jar.sha256}; got {found}; a proxy or mirror changed "
            f"the file: check the proxy and FLEET_MAVEN, and try again",
            code="jar-checksum-differs",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _keep(content, folder / jar.name)
    except OSError as error:
        raise FleetError(
            f"cannot write {folder / jar.name} ({error.strerror}); check permissions and free disk space, and try again",
            code="jar-unwritable",
        ) from None


def _keep(content: bytes, path: Path) -> None:
    # The temporary name is unique to the writer; concurrent writers rename the same content.
    atomic_write(path, content, temporary=path.with_name(f".{secrets.token_hex(4)}.part"))


def _fetch(jar: Jar) -> bytes:
    from http.client import HTTPException  # an expensive import, rarely needed: the JARs are usually cached

    address = f"{(os.environ.get('FLEET_MAVEN') or MAVEN_CENTRAL).rstrip('/')}/{jar.path}"
    reason: object = None
    for attempt in range(_TRIES):
        time.sleep(attempt)
        try:
            return _download(address)
        except (OSError, HTTPException, ValueError) as error:  # ValueError: FLEET_MAVEN is not a URL
            reason = error
    raise FleetError(
        f"cannot fetch {jar.name} from {address} ({reason}); check the network and the proxy (HTTPS_PROXY), or name "
        f"a mirror of Maven Central in FLEET_MAVEN, and try again",
        code="jar-not-fetched",
    )


def _download(address: str) -> bytes:
    from http.client import IncompleteRead
    from urllib.request import urlopen

    deadline = time.monotonic() + _DEADLINE_S
    content = bytearray()
    with urlopen(address, timeout=_TIMEOUT_S) as answer:
        while chunk := answer.read1(_CHUNK_BYTES):
            content += chunk
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {len(content)} bytes after {_DEADLINE_S} s")
        if answer.length:  # read1 does not report a truncated answer
            raise IncompleteRead(bytes(content), answer.length)
    return bytes(content)
