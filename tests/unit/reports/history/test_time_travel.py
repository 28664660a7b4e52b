"""Time travel: modes and known facts at an instant, and the life of a device."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.commands.inspect.rewind import rewind
from fleetpulse.core.errors import Misuse
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import DEVICES, JUDGEMENTS
from fleetpulse.core.times import END_OF_TIME_MS, format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports.history.time_travel import Moment, life
from tests.support.histories.histories import START, judgement_entry, registry_entries, row, signal, tick
from tests.support.homes.homes import JudgedHome, empty, landed_home
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
DEPLOYMENT = Deployment(10_000)
JUDGED_MS = START + 5_000_000  # all judgements, some time later


def _history() -> list[Row]:
    policy = parse_policy({"rules": {"timeout": "100s", "forget_after": "1000s", "degraded": {"errors": 2}}}).normalised()
    own = [
        row(0.5, "fleet/_/_/policy", policy=policy, effective_from_s=-3600),
        row(50.5, "pump/registry", op="add", **{"class": "quick", "gateway": "gate"}),
        row(30.5, "never/registry", op="add", effective_from_s=-500),  # refused: effective before the frontier
        tick(4000),
    ]
    beats = [signal(at, "pump") for at in (100, 150, 400, 3000)]
    errors = [signal(410, "pump", "error", code="e1"), signal(420, "pump", "error", code="e2")]
    return sorted([signal(0, "other"), signal(20, "other"), *own, *beats, *errors], key=lambda one: one.received_at_ms)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    rows = _history()
    made = landed_home(tmp_path / "home", rows, DEPLOYMENT)
    for table in (JUDGEMENTS, DEVICES):
        tables.create(made, table)
    emitted = replay(rows, DEPLOYMENT)
    summaries = [{"kind": "summary", "event_time_ms": START + 3_990_000, "key_group": 0, "judged_at_ms": JUDGED_MS}]
    tables.append(
        made, JUDGEMENTS, tables.to_table(JUDGEMENTS, [*(judgement_entry(one, JUDGED_MS) for one in emitted), *summaries]), "t", 1
    )
    tables.append(made, DEVICES, tables.to_table(DEVICES, registry_entries(rows)), "t", 1)
    return made


def _at(seconds: float) -> str:
    return format_instant(START + int(seconds * 1000))


def _json_rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def _rewind(home: Home, at_s: float, **more: Any) -> None:
    rewind(_at(at_s), home=home.path, **{"device": None, "known": "now", "mode": None, "last": 200, "json_lines": True, **more})


@pytest.mark.parametrize(
    ("at_s", "modes"),
    [
        (0, {"other": "online"}),
        (60, {"other": "online", "pump": "provisioned"}),
        (120, {"other": "offline", "pump": "online"}),
        (300, {"other": "offline", "pump": "offline"}),
        (419.999, {"other": "offline", "pump": "online"}),
        (420, {"other": "offline", "pump": "degraded"}),
        (1420, {"other": "forgotten", "pump": "forgotten"}),
        (3000, {"other": "forgotten", "pump": "online"}),
    ],
)
def test_rewind_shows_the_modes_of_each_instant(
    home: Home, capsys: pytest.CaptureFixture[str], at_s: float, modes: dict[str, str]
) -> None:
    _rewind(home, at_s)
    assert {one["device_id"]: one["mode"] for one in _json_rows(capsys)} == modes


def test_rewind_to_known_then_excludes_later_judgements(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    _rewind(home, 400, known="then")
    assert _json_rows(capsys) == []
    _rewind(home, 400, known=format_instant(JUDGED_MS))
    assert {one["device_id"]: one["mode"] for one in _json_rows(capsys)} == {"other": "offline", "pump": "online"}
    _rewind(home, 400, known="then", json_lines=False)
    shown = capsys.readouterr()
    assert "this history was judged from" in shown.err
    assert "judged by then: nothing" in shown.out


def test_life_of_a_device_lists_modes_reasons_and_durations(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    _rewind(home, 3050, device="pump")
    spans = _json_rows(capsys)
    assert [(one["mode"], one["trigger"], one["reason"], one["lasted_ms"]) for one in spans] == [
        ("provisioned", None, "registered", 49_500),
        ("online", "signal", None, 150_000),
        ("offline", "silence", f"last heard {_at(150)}", 150_000),
        ("online", "signal", None, 20_000),
        ("degraded", "errors", "last errors e1, e2", 100_000),
        ("offline", "silence", f"last heard {_at(420)}", 900_000),
        ("forgotten", "forget", f"last heard {_at(420)}", 1_580_000),
        ("online", "signal", None, 50_000),
    ]
    assert spans[0]["since"] == _at(50.5)
    assert spans[-1]["until"] is None
    _rewind(home, 3050, device="pump", json_lines=False)
    shown = capsys.readouterr().out
    assert "life of pump" in shown
    assert "25m" not in shown.splitlines()[0]
    assert "26m20s" in shown


def test_rewind_refuses_invalid_instants_and_unknown_devices(home: Home, tmp_path: Path) -> None:
    with refused("instant-before-history", match=f"begins at {_at(0)}; got --to {_at(-1)}"):
        _rewind(home, -1)
    with refused("instant-not-past", Misuse):
        _rewind(home, 10**9)
    with refused("device-unknown"):
        _rewind(home, 100, device="nobody")
    with refused("rewind-device-unknown"):
        _rewind(home, 100, device="never")
    with refused("rewind-device-unknown"):
        _rewind(home, 10, device="pump")
    with refused("rewind-device-unknown"):
        _rewind(home, 400, device="pump", known="then")
    with refused("instant-invalid"):
        _rewind(home, 400, known="yesterday")
    empty = Home(tmp_path / "empty")
    empty.prepare(DEPLOYMENT)
    with refused("home-without-history"):
        _rewind(empty, 0)


def test_imported_device_starts_in_the_from_mode_of_its_first_transition(tmp_path: Path) -> None:
    listed = empty(tmp_path / "listed", Deployment(10_000))
    transition = {
        "kind": "transition",
        "device_id": "pump",
        "site": "site",
        "device_class": "default",
        "trigger": "signal",
        "judged_at_ms": START,
    }
    transition |= {
        "life_ms": START,
        "event_time_ms": START + 300_000,
        "transition_no": 2,
        "from_mode": "offline",
        "to_mode": "online",
    }
    tables.append(listed, JUDGEMENTS, tables.to_table(JUDGEMENTS, [transition]), "test", 1)
    moment = Moment(START + 400_000, END_OF_TIME_MS, START + 390_000)
    assert [(one["mode"], one["since_ms"], one["lasted_ms"]) for one in life(listed, "pump", moment)] == [
        ("offline", START, 300_000),
        ("online", START + 300_000, 90_000),
    ]


def test_judged_by_then_excludes_the_verdict_jitter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged = JudgedHome(empty(tmp_path / "jittered", Deployment(10_000, verdict_jitter_ms=600_000)))
    judged.land_and_judge(*(signal(at, "pump") for at in range(0, 4001, 100)))
    _rewind(judged.home, 3500, json_lines=False)
    assert f"judged by then: up to {_at(3390)}" in capsys.readouterr().out
