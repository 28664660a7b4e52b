"""Log of the broker: failed logins and refused messages are counted, and no name forges a line."""

from pathlib import Path

import pytest

from fleetpulse.io.mqtt.embedded.broker_log import BrokerLog, refusals_of

pytestmark = pytest.mark.unit
NOW = 1_700_000_000_000
HEAD = '[25582] 2026/11/27 07:37:23.789777 [ERR] 10.0.0.7:47780 - mid:24 - "b0" - '
LOGIN = f'{HEAD}authentication error - User "fleet"\n{HEAD}unable to connect: authentication error\n'
QOS2 = f"{HEAD}QoS=2 is disabled for PUBLISH messages\n{HEAD}server does not accept QoS2 for Will messages\n"
REFUSED = f'{HEAD}Publish Violation - Subject "fleet.a.q.heartbeat"\n'


def test_failed_logins_and_refused_messages_since_the_start_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "broker.log"
    path.write_text(LOGIN * 3)
    log = BrokerLog(path, NOW)
    assert not log.read(NOW)
    assert refusals_of(log.status()) == ""
    with path.open("a") as file:
        file.write(LOGIN * 2 + REFUSED * 3 + LOGIN[:60])
        file.flush()
        assert log.read(NOW + 1)
        file.write(LOGIN[60:] + LOGIN.replace("fleet", "pump-1") + QOS2)
    assert log.read(NOW + 2)
    assert not log.read(NOW + 3)
    assert (log.failed_logins, log.refused, log.qos2) == (4, 3, 2)
    assert log.status()["users"] == {'"fleet"': 3, '"pump-1"': 1}
    assert log.status()["newest"] == {"user": '"pump-1"', "from": "10.0.0.7", "at_ms": NOW + 2}
    shown = refusals_of(log.status())
    assert '4 logins (3 as "fleet", 1 as "pump-1"; the newest' in shown and "3 messages" in shown
    assert "2 messages of QoS 2" in shown
    log.close()


def test_lines_before_and_after_a_rotation_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "broker.log"
    log = BrokerLog(path, NOW)
    assert not log.read(NOW), "the broker has not created its log yet"
    path.write_text(LOGIN)
    assert log.read(NOW)
    with path.open("a") as file:
        file.write(LOGIN)
    path.rename(tmp_path / "broker.log.2026.11.27")
    path.write_text(LOGIN * 2)
    assert log.read(NOW)
    assert log.failed_logins == 4
    log.close()


@pytest.mark.parametrize(
    "line",
    [
        '[1] 2026/11/27 07:37:23.1 [ERR] 10.0.0.7:1 - mid:1 - "\\" - authentication error - User \\"x" - invalid character\n',
        '[1] 2026/11/27 07:37:23.1 [INF] authentication error - User "x"\n',
        "\x00" * 300_000,
        "\n" * 1_000,
    ],
    ids=range(4),
)
def test_a_client_id_forges_no_failed_login(line: str, tmp_path: Path) -> None:
    log = BrokerLog(tmp_path / "broker.log", NOW)
    log.path.write_text(line)
    assert not log.read(NOW)
    log.close()


def test_counts_of_a_flood_of_user_names_are_bounded(tmp_path: Path) -> None:
    log = BrokerLog(tmp_path / "broker.log", NOW)
    lines = (LOGIN.replace('User "fleet"', f'User "{"x" * 200}{number}"') for number in range(3_000))
    log.path.write_text("".join(lines) + LOGIN.replace("fleet", "\\n[red]"))
    while log.read(NOW):
        pass
    assert log.failed_logins == 3_001
    assert len(refusals_of(log.status())) < 1_000
    assert log.status()["newest"]["user"] == '"\\n[red]"'
    log.close()
