"""Requests to the embedded broker at its NATS port."""

import io
import json
from typing import Any, cast

import pytest

from fleetpulse.io.mqtt.embedded.broker_api import BrokerApi

pytestmark = pytest.mark.unit


class _Server:
    """Server at the other end of the connection, with a stream of three messages."""

    def __init__(self) -> None:
        self.lines, self.subjects = io.BytesIO(), list[str]()

    def sendall(self, sent: bytes) -> None:
        subject = sent.split()[1].decode()
        self.subjects.append(subject.split(".")[3])
        answer = json.dumps({"name": "n"}).encode()
        batch = (
            b"".join(b"MSG s.%d 1 $JS.ACK.S.n.1.%d.1.0.0 0\r\n\r\n" % (one, one) for one in (1, 2, 3)) + b"MSG inbox 1 0\r\n\r\n"
        )
        place = self.lines.tell()
        self.lines.write(batch if "NEXT" in subject else b"MSG inbox 1 %d\r\n%b\r\n" % (len(answer), answer))
        self.lines.seek(place)


def test_a_search_that_stops_early_leaves_nothing_at_the_server() -> None:
    server = _Server()
    api = BrokerApi(cast("Any", server), server.lines, "inbox")
    with api.headers("S") as found:
        assert next(found) == ("s.1", 1, {})
    assert server.subjects == ["CREATE", "MSG", "DELETE"], "while the iterator still exists"
    assert server.lines.read() == b""
