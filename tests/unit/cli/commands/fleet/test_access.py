"""``fleet access`` for the HTTP server: tokens beside users of the broker, and one-time addresses."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.tables import AUDIT
from fleetpulse.io.home.home import PAGE, Home
from fleetpulse.io.home.services import page_held
from fleetpulse.io.mqtt import acl
from fleetpulse.io.system.process import write_status
from fleetpulse.reports.operations.audit import audited_actions
from fleetpulse.web.access import Access, User, WebRole, tokens
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def run(home: Home, *words: str) -> Any:
    """Run a command; return its result, or raise its error."""
    result = CliRunner().invoke(app, ["access", *words, "--home", str(home.path)])
    if isinstance(result.exception, FleetError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_a_token_is_printed_once_for_a_script_and_revoked_by_name(home: Home) -> None:
    result = run(home, "grant", "grafana", "--role", "api-reader")
    token = result.stdout.strip()
    assert "not shown again" in result.stderr and token not in result.stderr
    assert Access(home).by_token(token) == User("grafana", WebRole.API_READER)
    assert acl.grants(home.broker) == [], "it is no user of the broker"
    assert "the token of" in run(home, "revoke", "grafana").stderr
    assert tokens(home) == []
    with refused("user-unknown"):
        run(home, "revoke", "grafana")


@pytest.mark.parametrize(
    ("option", "value"), [("--for", "pump-1"), ("--sparkplug", "plant/line"), ("--topic", "line/#"), ("--certificate", "CN=x")]
)
def test_an_option_of_a_broker_user_is_refused_for_a_token(option: str, value: str, home: Home) -> None:
    with refused("option-conflict", Misuse, match=option):
        run(home, "grant", "grafana", "--role", "api-reader", option, value)
    assert tokens(home) == []


def test_a_name_belongs_to_a_user_of_the_broker_or_to_a_token(home: Home) -> None:
    run(home, "grant", "pump-1")
    with refused("name-of-user"):
        run(home, "grant", "pump-1", "--role", "api-reader")
    run(home, "grant", "grafana", "--role", "api-reader")
    for options in ((), ("--role", "watcher"), ("--certificate", "CN=grafana")):
        with refused("name-of-token"):
            run(home, "grant", "grafana", *options)
    assert ([one.name for one in acl.grants(home.broker)], [one.name for one in tokens(home)]) == (["pump-1"], ["grafana"])
    assert 'access of "pump-1"' in run(home, "revoke", "pump-1").stderr
    assert [one.name for one in tokens(home)] == ["grafana"]


def test_damaged_tokens_do_not_keep_a_user_of_the_broker(home: Home) -> None:
    run(home, "grant", "pump-1")
    run(home, "grant", "grafana", "--role", "api-reader")
    (home.path / "web" / "tokens.json").write_text("{")
    run(home, "revoke", "pump-1")
    assert acl.grants(home.broker) == []


def test_the_list_has_users_of_the_broker_and_tokens(home: Home) -> None:
    run(home, "grant", "ops", "--role", "watcher")
    token = run(home, "grant", "grafana", "--role", "api-reader").stdout.strip()
    listed = run(home, "list", "--json").stdout
    rows = [json.loads(line) for line in listed.splitlines()]
    assert [(one["name"], one["role"], one["created"] is None) for one in rows] == [
        ("ops", "watcher", True),
        ("grafana", "api-reader", False),
    ]
    shown = run(home, "list").stdout
    assert "grafana" in shown and "api-reader" in shown
    assert token not in listed + shown and tokens(home)[0].digest not in listed + shown


def test_no_token_and_no_one_time_address_reaches_the_audit(home: Home) -> None:
    token = run(home, "grant", "grafana", "--role", "api-reader").stdout.strip()
    with page_held(home, "a test"):
        write_status(home.run(PAGE), {"url": "http://127.0.0.1:5"})
        key = run(home, "login").stdout.strip().partition("=")[2]
    run(home, "revoke", "grafana")
    actions = audited_actions(home)
    assert [(one["action"], json.loads(one["arguments"])) for one in actions] == [
        ("access grant", {"name": "grafana", "role": "api-reader"}),
        ("access login", {}),
        ("access revoke", {"name": "grafana"}),
    ]
    files = [path for path in home.table(AUDIT.name).rglob("*") if path.is_file()]
    assert files
    secrets = [token.encode(), token.removeprefix("fleet_").encode(), key.encode()]
    assert not [path for path in files if any(secret in path.read_bytes() for secret in secrets)]


def test_a_login_is_for_the_running_server(home: Home) -> None:
    with refused("page-not-running"):
        run(home, "login")
    write_status(home.run(PAGE), {"url": "http://127.0.0.1:5"})
    with refused("page-not-running"):
        run(home, "login")  # the status of a server that was killed
    with page_held(home, "a test"):
        first, second = (run(home, "login").stdout.strip() for _ in range(2))
    assert first.startswith("http://127.0.0.1:5/login?key=")
    assert first != second
    assert Access(home).log_in(first.partition("=")[2]) is not None
