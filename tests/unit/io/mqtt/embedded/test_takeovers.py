"""Takeovers of client ids, from lines of the broker's log."""

from datetime import UTC, datetime
from pathlib import Path

from fleetpulse.io.mqtt.embedded.takeovers import read_takeovers

LINE = (
    '[7] 2026/11/27 07:{minute}:41.090296 [WRN] {address}:55432 - mid:29 - "{id}" - Replacing old client '
    '"192.0.2.1:46236 - mid:26 - \\"{id}\\"" since both have the same client ID "{id}"\n'
)


def test_takeovers_are_counted_by_client_id_since_an_instant(tmp_path: Path) -> None:
    log = tmp_path / "broker.log"
    assert read_takeovers(log) == []
    lines = [("10", "192.0.2.9", "pump-2"), ("20", "192.0.2.8", "pump-1"), ("30", "[2001:db8::1]", "pump-2")]
    log.write_text(
        "[7] 2026/11/27 07:00:00.000000 [INF] Server is ready\n"
        + "".join(LINE.format(minute=minute, address=address, id=name) for minute, address, name in lines)
    )
    first, second = read_takeovers(log)
    assert (first.client_id, first.times, first.address, first.replaced_address) == ("pump-2", 2, "[2001:db8::1]", "192.0.2.1")
    assert (first.first_at, first.last_at) == tuple(datetime(2026, 11, 27, 7, minute, 41, tzinfo=UTC) for minute in (10, 30))
    assert (second.client_id, second.times) == ("pump-1", 1)
    assert [one.times for one in read_takeovers(log, second.first_at)] == [1, 1]
    log.rename(tmp_path / "broker.log.2026.11.27.07.35.00.000000000")
    log.write_text(LINE.format(minute="40", address="192.0.2.7", id="pump-2"))
    newest = read_takeovers(log)[0]
    assert (newest.times, newest.address) == (3, "192.0.2.7"), "a rotation hides no takeover"
