"""Users of the HTTP server: tokens, one-time addresses, sessions, and the files that keep them."""

from pathlib import Path

import pytest

from fleetpulse.io.home.home import Home
from fleetpulse.web.access import (
    LOGIN_S,
    SESSION_S,
    Access,
    User,
    WebRole,
    grant_token,
    login_address,
    login_key,
    revoke_token,
    tokens,
)
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
NOW_S = 1_795_000_000


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_token_names_its_program_until_it_is_revoked(home: Home) -> None:
    access = Access(home)
    assert access.by_token("fleet_unknown") is None
    token = grant_token(home, "grafana", WebRole.API_READER, 5)
    other = grant_token(home, "billing", WebRole.API_READER, 6)
    assert access.by_token(token) == User("grafana", WebRole.API_READER)
    assert [(one.name, one.created_ms) for one in tokens(home)] == [("billing", 6), ("grafana", 5)]
    assert revoke_token(home, "grafana")
    assert not revoke_token(home, "grafana")
    assert access.by_token(token) is None
    assert access.by_token(other) == User("billing", WebRole.API_READER)


def test_a_new_token_replaces_that_of_the_same_name(home: Home) -> None:
    access = Access(home)
    first = grant_token(home, "grafana", WebRole.API_READER, 5)
    assert access.by_token(first) is not None
    second = grant_token(home, "grafana", WebRole.API_READER, 6)
    assert first != second
    assert access.by_token(first) is None
    assert access.by_token(second) == User("grafana", WebRole.API_READER)


@pytest.mark.parametrize("token", ["", "fleet_", "fleet_\xe9\xff", "fleet_\u2603", "x" * 20_000, "\x00"])
def test_a_text_that_is_no_token_has_no_user(token: str, home: Home) -> None:
    grant_token(home, "grafana", WebRole.API_READER, 5)
    assert Access(home).by_token(token) is None


@pytest.mark.parametrize("name", ["", "-x", "a b", "caf\xe9", "a/b", "x" * 129, "a\n"])
def test_a_malformed_name_is_refused(name: str, home: Home) -> None:
    with refused("token-name-invalid"):
        grant_token(home, name, WebRole.API_READER, 5)
    assert tokens(home) == []


def test_files_are_their_owners_alone_and_have_no_token(home: Home) -> None:
    token = grant_token(home, "grafana", WebRole.API_READER, 5)
    assert Access(home).log_in(login_key(home)) is not None
    folder = home.path / "web"
    assert mode(folder) == mode(folder / "used") == 0o700
    assert mode(folder / "tokens.json") == mode(folder / "session.key") == 0o600
    assert token not in (folder / "tokens.json").read_text()


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '[{"name": "x"}]', '[{"name": "x", "role": "king", "digest": "", "created_ms": 1}]']
)
def test_a_damaged_file_of_tokens_is_refused(content: str, home: Home) -> None:
    grant_token(home, "grafana", WebRole.API_READER, 5)
    (home.path / "web" / "tokens.json").write_text(content)
    with refused("tokens-damaged"):
        tokens(home)
    with refused("tokens-damaged"):
        Access(home).by_token("fleet_x")
    with refused("tokens-damaged"):
        grant_token(home, "billing", WebRole.API_READER, 5)
    assert (home.path / "web" / "tokens.json").read_text() == content, "a person may still restore it"


def test_a_one_time_key_is_accepted_once_even_by_a_server_that_is_started_again(home: Home) -> None:
    key = login_key(home, "ann", NOW_S)
    session = Access(home).log_in(key, NOW_S + 1)
    assert session is not None
    assert Access(home).by_session(session, NOW_S + 1) == User("ann", WebRole.VIEWER)
    assert Access(home).log_in(key, NOW_S + 2) is None
    assert Access(home).log_in(key, NOW_S + LOGIN_S - 1) is None


def test_records_of_used_keys_are_removed_once_the_keys_have_expired(home: Home) -> None:
    access = Access(home)
    for now_s in (NOW_S, NOW_S + 1):
        assert access.log_in(login_key(home, now_s=now_s), now_s) is not None
    assert len(list((home.path / "web" / "used").iterdir())) == 2
    later_s = NOW_S + 2 * LOGIN_S
    assert access.log_in(login_key(home, now_s=later_s), later_s) is not None
    assert len(list((home.path / "web" / "used").iterdir())) == 1


def test_a_one_time_key_expires(home: Home) -> None:
    key = login_key(home, now_s=NOW_S)
    assert Access(home).log_in(key, NOW_S + LOGIN_S) is None
    assert Access(home).log_in(key, NOW_S + LOGIN_S - 1) is not None


def test_a_session_expires_and_ends_with_the_key_of_the_home(home: Home) -> None:
    access = Access(home)
    session = access.log_in(login_key(home, now_s=NOW_S), NOW_S)
    assert session is not None
    assert access.by_session(session, NOW_S + SESSION_S - 1) is not None
    assert access.by_session(session, NOW_S + SESSION_S) is None
    (home.path / "web" / "session.key").unlink()
    assert access.by_session(session, NOW_S + 1) is None


def test_a_one_time_key_is_no_session_and_a_session_is_no_one_time_key(home: Home) -> None:
    access, key = Access(home), login_key(home, now_s=NOW_S)
    assert access.by_session(key, NOW_S) is None
    session = access.log_in(key, NOW_S)
    assert session is not None
    assert access.log_in(session, NOW_S) is None


def test_a_key_of_another_home_is_refused(home: Home, tmp_path: Path) -> None:
    other = Home(tmp_path / "other")
    other.prepare(None)
    assert Access(home).log_in(login_key(other, now_s=NOW_S), NOW_S) is None


def _forgeries() -> list[str]:
    return [
        "",
        ".",
        "..",
        "a.b.c.d",
        "fffffffff.viewer.00.",
        "-1.viewer.00.00",
        "1_0.viewer.00.00",
        "f" * 13 + ".viewer.00.00",
        "\xe9.viewer.00.00",
        "6afd\u0663.viewer.00.00",
        "f" * 100_000,
    ]


@pytest.mark.parametrize("forged", _forgeries())
def test_a_forged_key_or_session_is_refused(forged: str, home: Home) -> None:
    access = Access(home)
    assert access.log_in(forged, NOW_S) is None
    assert access.by_session(forged, NOW_S) is None


def test_a_changed_key_is_refused(home: Home) -> None:
    key, access = login_key(home, "ann", NOW_S), Access(home)
    until, user, nonce, signature = key.split(".")
    later = f"{int(until, 16) + 1:x}"
    changed = [
        f"{later}.{user}.{nonce}.{signature}",
        f"{until}.bob.{nonce}.{signature}",
        f"{until}.{user}.{'0' * 16}.{signature}",
        f"{until}.{user}.{nonce}.{signature[:-1]}",
        f"{until.upper()}.{user}.{nonce}.{signature.upper()}",
        f" {key}",
        f"{key}\xe9",
    ]
    assert [one for one in changed if access.log_in(one, NOW_S) is not None] == []
    assert access.log_in(key, NOW_S) is not None


def test_each_one_time_address_is_another(home: Home) -> None:
    first, second = (login_address(home, "http://127.0.0.1:8090") for _ in range(2))
    assert first.startswith("http://127.0.0.1:8090/login?key=")
    assert first != second


def test_a_record_that_another_login_removes_meanwhile_is_no_fault(home: Home) -> None:
    access, first, second = Access(home), login_key(home, now_s=NOW_S), login_key(home, now_s=NOW_S)
    assert access.log_in(first, NOW_S)
    (home.path / "web" / "used" / "removed").symlink_to(home.path / "nothing")  # listed, and then not found
    assert access.log_in(second, NOW_S)
