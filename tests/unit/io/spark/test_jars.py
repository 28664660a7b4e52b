"""JARs: only a file with the pinned checksum is kept."""

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fleetpulse.io.spark import jars
from fleetpulse.io.spark.jars import JARS, Jar, require_jars, resolve_jars
from tests.support.refusals import refused

CONTENT = b"a JAR, as far as a checksum can tell" * 1000
PINNED = Jar("org.example.group", "thing", "1.2", hashlib.sha256(CONTENT).hexdigest())


class Repository(ThreadingHTTPServer):
    """Maven repository with one file, which records the requested paths."""

    content: bytes = CONTENT
    claims_bytes: int | None = None

    def __init__(self) -> None:
        self.requested: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Repository

    def do_GET(self) -> None:
        self.server.requested.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(self.server.claims_bytes or len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - name of the base class
        pass


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    with Repository() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("FLEET_MAVEN", f"http://127.0.0.1:{server.server_port}/maven/")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(jars.time, "sleep", lambda _: None)
        yield server
        server.shutdown()
        thread.join()


def test_a_jar_is_fetched_once(repository: Repository, tmp_path: Path) -> None:
    for _ in range(2):
        assert [path.read_bytes() for path in resolve_jars(tmp_path / "jars", [PINNED])] == [CONTENT]
    assert repository.requested == ["/maven/org/example/group/thing/1.2/thing-1.2.jar"]


def test_a_jar_of_another_checksum_is_refused_and_not_kept(repository: Repository, tmp_path: Path) -> None:
    repository.content = b"something else"
    with refused("jar-checksum-differs", match=rf"thing-1\.2\.jar differs: expected SHA-256 {PINNED.sha256}; got .*FLEET_MAVEN"):
        resolve_jars(tmp_path, [PINNED])
    assert list(tmp_path.iterdir()) == []


def test_truncated_jar_is_fetched_again_and_then_refused(repository: Repository, tmp_path: Path) -> None:
    repository.claims_bytes = len(CONTENT) + 1
    with refused("jar-not-fetched"):
        resolve_jars(tmp_path, [PINNED])
    assert len(repository.requested) == 3
    assert list(tmp_path.iterdir()) == []


def test_concurrent_fetches_keep_one_file(repository: Repository, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: resolve_jars(tmp_path, [PINNED]), range(8)))
    assert found == [[tmp_path / PINNED.name]] * 8
    assert [path.name for path in tmp_path.iterdir()] == [PINNED.name]


@pytest.mark.parametrize("address", ["not an address", "http://127.0.0.1:1"])
def test_unreachable_repository_is_reported_in_one_line(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLEET_MAVEN", address)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(jars.time, "sleep", lambda _: None)
    with refused("jar-not-fetched") as caught:
        resolve_jars(tmp_path, [PINNED])
    assert "\n" not in str(caught.value)


def test_every_jar_is_pinned() -> None:
    assert len({jar.name for jar in JARS}) == len(JARS)
    assert all(len(jar.sha256) == 64 and int(jar.sha256, 16) for jar in JARS)


def test_the_cache_is_checked_without_a_download(tmp_path: Path) -> None:
    with refused("jar-missing", match=PINNED.name):
        require_jars(tmp_path, [PINNED])
    (tmp_path / PINNED.name).write_bytes(CONTENT)
    require_jars(tmp_path, [PINNED])
    (tmp_path / PINNED.name).write_bytes(CONTENT[1:])
    with refused("jar-checksum-differs"):
        require_jars(tmp_path, [PINNED])
