"""Java: the downloaded JDK has a pinned version and checksum, and no other archive is unpacked."""

import functools
import hashlib
import io
import re
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cjdk
import pytest

from fleetpulse.io.spark import java
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
PATH = "/jdk-17.0.20%2B8/OpenJDK17U-jdk_x64_linux_hotspot_17.0.20_8.tar.gz"
HOME = "jdk-17.0.20+8"
JAVA = """#!/bin/sh
echo 'openjdk version "17.0.20"' >&2
echo "    java.home = $(cd "$(dirname "$0")/.." && pwd)" >&2
"""


def archive() -> bytes:
    """Return a JDK, as far as `find_java` can tell."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        entry = tarfile.TarInfo(f"{HOME}/bin/java")
        entry.size, entry.mode = len(JAVA), 0o755
        tar.addfile(entry, io.BytesIO(JAVA.encode()))
    return content.getvalue()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = archive_served if self.path == PATH else b""
        self.send_response(200 if content else 404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - name of the base class
        pass


archive_served = archive()


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Give a Linux machine without Java, and a server with the archive."""
    monkeypatch.setattr(java.sys, "platform", "linux")
    monkeypatch.setattr(java.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(java.shutil, "which", lambda _: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(cjdk, "cache_package", functools.partial(cjdk.cache_package, _allow_insecure_for_testing=True))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(java, "RELEASES", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()
        thread.join()


def pin(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    monkeypatch.setitem(java.ARCHIVES, ("linux", "x86_64"), ("x64_linux", sha256))


def test_the_pinned_jdk_is_downloaded_and_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pin(monkeypatch, hashlib.sha256(archive_served).hexdigest())
    home = java.find_java()
    assert home.name == HOME and (tmp_path / "java_home").read_text() == f"{home}\n"
    monkeypatch.setattr(java, "RELEASES", "http://127.0.0.1:1")
    assert java.find_java() == home


def test_an_archive_of_another_checksum_is_not_unpacked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pin(monkeypatch, "0" * 64)
    with refused("java-missing", match=r"SHA-256 0{64} failed \(Hash does not match\)"):
        java.find_java()
    assert not [*tmp_path.rglob("bin")] and not (tmp_path / "java_home").exists()


def test_no_jdk_is_downloaded_for_a_platform_without_a_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java.platform, "machine", lambda: "i686")
    with refused("java-missing", match="no JDK is pinned for linux on i686"):
        java.find_java()


def test_every_archive_is_pinned() -> None:
    assert {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("darwin", "x86_64")} <= set(java.ARCHIVES)
    assert all(re.fullmatch("[0-9a-f]{64}", sha256) for _, sha256 in java.ARCHIVES.values())
    assert len(set(java.ARCHIVES.values())) == len(java.ARCHIVES)
