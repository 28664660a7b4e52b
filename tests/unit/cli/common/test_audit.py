"""Audit of commands: declarations, records of results and refusals, records that cannot be written."""

import json
import os
import pwd
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from cli.app import VERBS, app
from cli.common.audit import AUDITED, NOT_AUDITED, READ_ONLY
from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import AUDIT
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt import acl
from fleetpulse.reports.operations.audit import UNFINISHED, audited_actions
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _local_session(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLEET_ASKED_BY", "SUDO_USER", "SSH_CLIENT", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)


def _run(home: Home, *arguments: str) -> Any:
    """Run a command; return its result, or raise its error."""
    result = CliRunner().invoke(app, [*arguments, "--home", str(home.path)])
    if isinstance(result.exception, FleetError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def _commands(commands: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield the words of each command, and the names of its parameters."""
    for name, command in commands.items():
        children = getattr(command, "commands", None)
        if children is None:
            yield above + name, {parameter.name for parameter in command.params}
        else:
            yield from _commands(children, f"{above}{name} ")


def test_each_command_is_declared_once_as_audited_read_only_or_not_audited() -> None:
    group: Any = get_command(app)
    found = dict(_commands({name: group.commands[name] for name in VERBS}))
    times = {
        path: (path in AUDITED) + (path in READ_ONLY) + any(name in NOT_AUDITED for name in {path, path.split()[0]})
        for path in found
    }
    assert {path: count for path, count in times.items() if count != 1} == {}
    assert {*AUDITED, *READ_ONLY, *NOT_AUDITED} <= {*found, *(path.split()[0] for path in found)}
    assert [path for path in AUDITED if "home" not in found[path]] == [], "their records would have no table"


def test_a_grant_and_a_refused_attempt_are_recorded_without_the_password(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    password = _run(home, "access", "grant", "pump-1").stdout.strip()
    monkeypatch.setenv("SSH_CLIENT", "192.0.2.7 50122 22")
    monkeypatch.setenv("SUDO_USER", "ada")
    monkeypatch.setenv("LOGNAME", "root, honestly")
    with refused("user-unknown"):
        _run(home, "access", "revoke", "nobody")
    user, host = pwd.getpwuid(os.getuid()).pw_name, socket.gethostname()
    columns = ("action", "os_user", "asked_by", "host", "address", "result")
    actions = audited_actions(home)
    assert [tuple(one[name] for name in columns) for one in actions] == [
        ("access grant", user, None, host, None, "ok"),
        ("access revoke", user, "ada", host, "192.0.2.7", "user-unknown"),
    ]
    assert [json.loads(one["arguments"]) for one in actions] == [{"name": "pump-1", "role": "device"}, {"name": "nobody"}]
    assert all(one["duration_ms"] >= 0 for one in actions)
    files = [path for path in home.table(AUDIT.name).rglob("*") if path.is_file()]
    assert files and not [path for path in files if password.encode() in path.read_bytes()]


def test_the_record_of_the_start_is_written_before_the_command_acts(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[dict[str, Any]] = []

    def killed(*_: object) -> None:
        at_once.extend(audited_actions(home))
        raise KeyboardInterrupt

    monkeypatch.setattr(acl, "revoke", killed)
    assert CliRunner().invoke(app, ["access", "revoke", "pump-1", "--home", str(home.path)]).exit_code != 0
    assert [(one["action"], one["result"], one["duration_ms"]) for one in at_once] == [("access revoke", UNFINISHED, None)]
    assert [one["result"] for one in audited_actions(home)] == ["interrupted"]


def test_without_a_record_nothing_is_granted_but_a_right_can_be_revoked(home: Home) -> None:
    _run(home, "access", "grant", "pump-1")
    _run(home, "access", "grant", "pump-2")
    tables = home.path / "tables"
    tables.rename(home.path / "aside")
    tables.write_text("no folder")
    with refused("audit-unwritable"):
        _run(home, "access", "grant", "eve")
    done = _run(home, "access", "revoke", "pump-1")
    assert 'warning: the audit record of "access revoke" cannot be written' in done.stderr
    assert "the result of" in done.stderr
    assert [one.name for one in acl.grants(home.broker)] == ["pump-2"]


def test_dry_runs_reads_and_commands_without_a_home_leave_no_record(home: Home, tmp_path: Path) -> None:
    for arguments in (("state", "prune", "--dry-run"), ("access", "list"), ("audit",)):
        _run(home, *arguments)
    with refused("home-missing"):
        _run(Home(tmp_path / "absent"), "access", "revoke", "pump-1")
    assert not home.table(AUDIT.name).exists() and not (tmp_path / "absent").exists()


def test_the_audit_is_shown_for_people_and_as_json(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(home, "policy", "apply", str(_policy(home)))
    monkeypatch.setenv("FLEET_ASKED_BY", "bob, fleet_migrate manual__1")
    _run(home, "device", "add", "pump-1", "--timeout", "2h")
    shown = _run(home, "audit", "--actor", "bob").stdout
    assert "device add" in shown and "timeout=2h" in shown and "policy apply" not in shown
    [row] = [json.loads(line) for line in _run(home, "audit", "--json", "--action", "policy").stdout.splitlines()]
    assert (row["action"], row["arguments"], row["result"]) == ("policy apply", {"file": str(_policy(home))}, "ok")
    assert isinstance(row["duration_ms"], int) and row["began_at"].endswith("Z")


def _policy(home: Home) -> Path:
    path = home.path.parent / "policy.toml"
    path.write_text('[rules]\ntimeout = "30m"\n')
    return path
