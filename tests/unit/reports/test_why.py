"""Why a device is in its mode, read from the tables of a home and shown by ``fleet why``."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cli.commands.inspect import why as command
from fleetpulse.core.amendments import amend, histories
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import DEVICES, JUDGEMENTS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports.why import why
from tests.support.histories.histories import START, registry_entries, row, signal, tick
from tests.support.homes.homes import JudgedHome, empty
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
RULES = {"timeout": "100s"}


def _home(path: Path, *rows: Row, rules: Mapping[str, Any] = RULES) -> JudgedHome:
    judged = JudgedHome(empty(path / "home", Deployment(10_000)))
    policy = parse_policy({"rules": rules}).normalised()
    judged.land_and_judge(row(0, "fleet/_/_/policy", policy=policy, effective_from_s=-1000), *rows)
    tables.append(judged.home, DEVICES, tables.to_table(DEVICES, registry_entries(rows)), "test", 1)
    return judged


def _amend(judged: JudgedHome, device_id: str) -> None:
    both = histories(judged.rows, judged.home.deployment())
    [found] = amend(both, {device_id: []}).values()
    more = {"judged_at_ms": START + 900_000, "generation": 1}
    rows = [{**asdict(one), **more, "last_errors": json.dumps(one.last_errors)} for one in found]
    tables.append(judged.home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "amend", 1)


def _why(home: Home, device_id: str, newest_s: int, at_s: float | None = None) -> dict[str, Any]:
    at_ms = None if at_s is None else START + int(at_s * 1000)
    return why(home, device_id, START + newest_s * 1000, at_ms)


def test_the_present_mode_is_explained_with_the_next_deadline(tmp_path: Path) -> None:
    home = _home(tmp_path, signal(10, "pump"), signal(60, "pump"), tick(100)).home
    found = _why(home, "pump", 100)
    assert (found["mode"], found["sentence"], found["note"]) == ("online", "a heartbeat message was received, the first one", "")
    assert found["next"] == {"at_ms": START + 160_000, "trigger": "silence", "mode": "offline"}
    assert found["judged"]["judged_at_ms"] == START + 100_000


def test_the_mode_at_an_earlier_instant_is_explained(tmp_path: Path) -> None:
    home = _home(tmp_path, signal(10, "pump"), signal(200, "pump"), tick(250)).home
    assert _why(home, "pump", 250)["sentence"] == "a heartbeat message was received, 3m10s after the one before"
    earlier = _why(home, "pump", 250, at_s=150)
    assert (earlier["mode"], earlier["since_ms"], earlier["next"]) == ("offline", START + 110_000, None)
    assert earlier["rule"]["value"] == "1m40s"
    with refused("why-without-mode"):
        _why(home, "pump", 250, at_s=5)


def test_an_added_transition_is_explained_with_its_late_messages(tmp_path: Path) -> None:
    judged = _home(tmp_path, signal(10, "pump"), tick(200), signal(80, "pump", received_s=205), tick(210), tick(400))
    assert _why(judged.home, "pump", 400, at_s=150)["since_ms"] == START + 110_000
    _amend(judged, "pump")
    found = _why(judged.home, "pump", 400, at_s=190)
    assert found["transition"]["kind"] == "add"
    assert found["terms"][0] == {"meaning": "last signal", "at_ms": START + 80_000}
    assert [one["event_time_ms"] for one in found["late"]] == [START + 80_000]
    assert {one["kind"] for one in found["amendments"]} == {"retract", "add"}


def test_a_device_without_transition_has_a_sentence(tmp_path: Path) -> None:
    added = row(5, "fleet/site/silent/registry", op="add")
    home = _home(tmp_path, added, signal(10, "pump"), signal(58, "new"), tick(60)).home
    assert _why(home, "silent", 60)["sentence"] == "it was registered, and no signal has been judged since"
    assert (_why(home, "new", 60)["mode"], _why(home, "new", 60)["sentence"]) == ("unjudged", "waiting for the frontier")
    with refused("device-unknown"):
        _why(home, "nobody", 60)


def test_a_device_that_was_registered_again_is_provisioned(tmp_path: Path) -> None:
    again = row(1010, "fleet/site/pump/registry", op="add")
    home = _home(tmp_path, signal(10, "pump"), again, tick(1040), rules={"timeout": "100s", "forget_after": "500s"}).home
    found = _why(home, "pump", 1040)
    assert (found["mode"], found["since_ms"], found["transition"]) == ("provisioned", START + 1_010_000, None)
    assert found["sentence"] == "it was registered, and no signal has been judged since"
    assert _why(home, "pump", 1040, at_s=600)["mode"] == "forgotten"


def test_an_instant_beyond_the_frontier_has_a_note(tmp_path: Path) -> None:
    home = _home(tmp_path, signal(10, "pump"), tick(60)).home
    assert _why(home, "pump", 60, at_s=40)["note"] == ""
    assert _why(home, "pump", 60, at_s=5_000)["note"] == "Verdicts are final up to 2023-11-14T22:14:10.000Z only."


def test_the_command_shows_arithmetic_rows_and_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = _home(tmp_path, signal(10, "pump", boot="b1", seq=7), tick(200)).home
    command.why("pump", home=home.path)
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "pump is offline since 2023-11-14T22:15:10.000Z: nothing was heard for 1m40s of covered time"
    assert "    2023-11-14T22:13:30.000Z  last signal" in shown
    assert "  + 1m40s                     timeout" in shown
    assert "  = 2023-11-14T22:15:10.000Z  offline" in shown
    assert "rule: timeout: 1m40s (class default), in force since" in shown
    assert "A signal of the device at or before 2023-11-14T22:15:10.000Z would have prevented it." in shown
    command.why("pump", home=home.path, json_lines=True)
    content = json.loads(capsys.readouterr().out)
    assert content["evidence"][0]["seq"] == 7
    assert content["terms"][1] == {"meaning": "timeout", "span_ms": 100_000}


def test_a_transition_whose_messages_are_no_longer_kept_has_a_note(tmp_path: Path) -> None:
    judged = _home(tmp_path, signal(10, "pump"), tick(200))
    stray = {"kind": "transition", "device_id": "pump", "life_ms": START, "transition_no": 9, "from_mode": "online"}
    stray |= {"to_mode": "offline", "trigger": "silence", "event_time_ms": START + 500_000, "judged_at_ms": START + 600_000}
    tables.append(judged.home, JUDGEMENTS, tables.to_table(JUDGEMENTS, [stray]), "stray", 1)
    found = _why(judged.home, "pump", 600)
    assert found["note"].startswith("The retained messages do not lead to this transition")
    assert (found["sentence"], found["next"]) == ("trigger silence", None)


def test_each_of_several_transitions_at_one_instant_is_explained(tmp_path: Path) -> None:
    rules: dict[str, Any] = {
        "timeout": "100s",
        "degraded": {"errors": 2, "window": "60s"},
        "flagged": {"codes": ["probe", "break-in"], "window": "60s"},
    }
    errors = [row(second, "fleet/site/pump/error", code=code) for second, code in ((20, "probe"), (30, "break-in"))]
    home = _home(tmp_path, signal(10, "pump"), *errors, tick(60), rules=rules).home
    assert _why(home, "pump", 60, at_s=30)["mode"] == "flagged"
    found = why(home, "pump", START + 60_000, START + 30_000, "degraded")
    assert (found["mode"], found["transition"]["trigger"]) == ("degraded", "errors")
    assert found["rule"]["key"] == "degraded"
    assert why(home, "pump", START + 60_000, START + 30_000, "offline")["mode"] == "flagged"


def test_an_id_in_a_command_to_type_is_quoted(tmp_path: Path) -> None:
    judged = _home(tmp_path, signal(10, "a;$(id)"), tick(40))
    with refused("why-without-mode", match=r"--device 'a;\$\(id\)' --home"):
        why(judged.home, "a;$(id)", START + 40_000, 1)
