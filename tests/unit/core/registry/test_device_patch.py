"""Corrections of the registry: their entries, the amendments that follow, and refused ones."""

import fcntl
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batch.amend import AmendRequest, amend_home
from cli.commands.fleet.device import correct, release
from fleetpulse.core.device import Device
from fleetpulse.core.errors import Misuse
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.registry.device_patch import decode_device, encode_device, fingerprint
from fleetpulse.core.registry.registry import Correction, Entry, corrected
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import DEVICES
from fleetpulse.io.home.command_spool import spool_lock, spool_locked
from fleetpulse.io.ingest.segments import SegmentRow, rows_table, write_segment
from fleetpulse.io.tables import tables
from fleetpulse.reports import judgements
from streaming.landing.landing import Landing
from tests.support.histories.histories import START, registry_entries, row, signal, tick
from tests.support.homes.amended import agrees_with_definition, correction_rows, transitions_of
from tests.support.homes.homes import JudgedHome, empty
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
DEPLOYMENT = Deployment(allowed_lateness_ms=1_000, max_clock_lead_ms=300_000)
RULES: dict[str, Any] = {"rules": {"timeout": "60s", "forget_after": "10h"}, "classes": {"slow": {"timeout": "10m"}}}


def _register(judged_home: JudgedHome, *rows: Row) -> None:
    """Write entries to the table of the registry as landing does, and judge them."""
    landed = {"origin": "command", "bridge": "b", "segment": 1}
    plain = [{**one, **landed} for one in registry_entries(rows)]
    tables.append(judged_home.home, DEVICES, tables.to_table(DEVICES, plain), "test", int(rows[0].received_at_ms))
    judged_home.land_and_judge(*rows)


@pytest.fixture
def judged_home(tmp_path: Path) -> JudgedHome:
    """A home with a device of class slow at site north, heard at 30 s and judged offline at 630 s."""
    prepared = JudgedHome(empty(tmp_path / "home", DEPLOYMENT))
    prepared.land_and_judge(row(0, "fleet/_/_/policy", policy=parse_policy(RULES).normalised(), effective_from_s=-1000))
    _register(prepared, row(20, "fleet/north/d/registry", op="add", gateway="g", **{"class": "slow"}))
    prepared.land_and_judge(signal(30), tick(800))
    return prepared


def _pending_commands(judged_home: JudgedHome) -> list[dict[str, Any]]:
    """Return the commands that no bridge has taken."""
    return [one for path in judged_home.home.commands.glob("*.json") for one in json.loads(path.read_text())]


def _amended(judged_home: JudgedHome, **correction: Any) -> list[dict[str, Any]]:
    """Correct the device, judge the entry, which is refused, amend, and return the transitions."""
    at_s = correction.pop("at_s")
    correct("d", from_=str(START + int(at_s * 1000)), home=judged_home.home.path, **correction)
    judged_home.land_and_judge(*correction_rows(judged_home.home, 900), tick(910))
    assert [one["message_kind"] for one in judgements.unjudged(judged_home.home, "refused")] == ["registry"]
    [result] = amend_home(judged_home.home, AmendRequest())
    assert result.left is None or result.corrected
    assert agrees_with_definition(judged_home.home)
    return judgements.transitions(judged_home.home, "d")


def test_fields_about_reviews_are_encoded_only_with_a_value() -> None:
    plain = Device("d", "north", "slow", None, START, START, 0)
    encoded = encode_device(plain, 0)
    assert not {"velocity_count", "velocity_since_ms", "review_ms", "confirmed_ms"} & {*encoded}, "as in older rows"
    assert decode_device("d", encoded, lambda _: 0) == plain
    counting = replace(plain, velocity_count=2, velocity_since_ms=START, flagged_until_ms=START + 1, review_ms=START)
    assert decode_device("d", encode_device(counting, 0), lambda _: 0) == counting
    assert fingerprint(counting, 0, START) != fingerprint(plain, 0, START)


@pytest.mark.parametrize(
    "fields",
    [
        {"velocity_count": 2},
        {"velocity_since_ms": START},
        {"review_ms": START},
        {"confirmed_ms": START},
        {"velocity_count": 1_000},
    ],
)
def test_inconsistent_fields_about_reviews_are_refused(fields: dict[str, int]) -> None:
    encoded = encode_device(Device("d", "north", "slow", None, START, START, 0), 0)
    with pytest.raises(ValueError, match=r"invalid fields: (velocity_count|velocity_since_ms|review_ms|confirmed_ms)"):
        decode_device("d", {**encoded, **fields}, lambda _: 0)


def test_a_correction_of_the_site_keeps_the_class(judged_home: JudgedHome) -> None:
    shown = _amended(judged_home, at_s=100, site="south")
    assert [(one["to_mode"], one["site"], one["device_class"]) for one in shown] == [
        ("online", "north", "slow"),
        ("offline", "south", "slow"),
    ]


def test_a_correction_of_the_class_keeps_the_site(judged_home: JudgedHome) -> None:
    _register(judged_home, row(850, "fleet/south/d/registry", op="add", **{"class": "slow"}))
    shown = _amended(judged_home, at_s=40, device_class="default")
    assert transitions_of(judged_home.home)[1] == (90, "offline", "silence")
    assert [one["site"] for one in shown] == ["north", "north"]


def test_a_correction_of_the_gateway_applies_from_its_instant(judged_home: JudgedHome) -> None:
    assert [one["gateway"] for one in _amended(judged_home, at_s=100, gateway="h")] == ["g", "h"]


def test_a_correction_to_decommissioned_replaces_the_offline_transition(judged_home: JudgedHome) -> None:
    _amended(judged_home, at_s=100, decommissioned=True)
    assert transitions_of(judged_home.home)[1:] == [(100, "decommissioned", "decommission")]


def test_a_correction_to_an_earlier_registration_extends_the_life(judged_home: JudgedHome) -> None:
    shown = _amended(judged_home, at_s=5, registered=True)
    assert {one["life"].timestamp() for one in shown} == {START / 1000 + 5}
    assert {(one["site"], one["device_class"]) for one in shown} == {("north", "slow")}


def test_a_correction_registers_a_decommissioned_device_again(judged_home: JudgedHome) -> None:
    _register(judged_home, row(810, "fleet/_/d/registry", op="decommission"))
    judged_home.land_and_judge(tick(850))
    with refused("correction-after-decommission"):
        correct("d", from_=str(START + 830_000), site="south", home=judged_home.home.path)
    with refused("correction-after-decommission"):
        correct("d", from_=str(START + 830_000), decommissioned=True, home=judged_home.home.path)
    _amended(judged_home, at_s=830, registered=True, site="south")
    assert transitions_of(judged_home.home)[-1] == (830, "provisioned", "registered")


def test_a_correction_applies_after_entries_of_the_same_instant() -> None:
    known = [Entry(10, "add", "north", "slow", "g"), Entry(11, "add", "north"), Entry(90, "add", "west", "quick")]
    assert corrected(known, "heard", Correction(10, "new")) == Entry(12, "add", "north", "new")
    assert corrected(known, "heard", Correction(5, registered=True)) == Entry(5, "add", "north", "slow")
    assert corrected(known, "heard", Correction(95, site="east")) == Entry(95, "add", "east", "quick")
    assert corrected(known, "heard", Correction(5, "new", registered=True)) == Entry(5, "add", "north", "new")
    assert corrected([], "heard", Correction(5, gateway="h")) == Entry(5, "add", "heard", None, "h")


def test_a_correction_is_refused_while_a_registry_entry_is_pending(judged_home: JudgedHome) -> None:
    def correct_again() -> None:
        correct("d", from_=str(START + 100_000), device_class="quick", home=judged_home.home.path)

    judged_home.land_and_judge(signal(40, "e"))
    correct("d", from_=str(START + 100_000), site="south", home=judged_home.home.path)
    correct("e", from_=str(START + 100_000), site="south", home=judged_home.home.path)  # another device
    [path] = [path for path in judged_home.home.commands.glob("*.json") if "/d/" in path.read_text()]
    [command] = json.loads(path.read_text())
    with refused("registry-entry-pending"):
        correct_again()
    taken = path.rename(path.with_name(f"{path.name}.taken-1"))
    with refused("registry-entry-pending"):
        correct_again()
    payload = json.dumps(command["payload"]).encode()
    rows = [SegmentRow(START + 900_000, command["topic"], payload, "command", command=path.name)]
    write_segment(judged_home.home.segments, 1, rows_table(rows), bridge="bridge", last_canary_ms=None)
    taken.unlink()
    with refused("registry-entry-pending"):
        correct_again()
    assert Landing(judged_home.home).step() == 1
    correct_again()
    [second] = [one for one in _pending_commands(judged_home) if "/d/" in one["topic"]]
    assert second["topic"] == "fleet/south/d/registry", "the second entry follows the first"
    assert second["payload"] == {"op": "add", "class": "quick", "effective_from": START + 100_001}


def test_the_second_of_two_concurrent_corrections_sees_the_first(
    judged_home: JudgedHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_thread, requested, flock = threading.get_ident(), threading.Event(), fcntl.flock

    def recording_flock(file: Any, operation: int) -> None:
        opened = os.fstat(file if isinstance(file, int) else file.fileno())
        if threading.get_ident() != first_thread and os.path.samestat(opened, judged_home.home.commands.stat()):
            requested.set()
        flock(file, operation)

    def correct_second() -> None:
        correct("d", from_=str(START + 100_000), device_class="quick", home=judged_home.home.path)

    with ThreadPoolExecutor(1) as executor:
        with spool_lock(judged_home.home):
            monkeypatch.setattr(fcntl, "flock", recording_flock)
            second = executor.submit(correct_second)
            second.add_done_callback(lambda _: requested.set())
            assert requested.wait(60), "the second correction neither requests the lock nor ends"
            assert not second.done(), "the second correction did not wait for the first"
            spool_locked(judged_home.home, [("fleet/south/d/registry", {"op": "add", "effective_from": START + 100_000})])
        with refused("registry-entry-pending"):
            second.result(timeout=60)
    assert [one["topic"] for one in _pending_commands(judged_home)] == ["fleet/south/d/registry"]


def test_a_correction_ignores_other_commands_and_entries_that_will_not_land(judged_home: JudgedHome) -> None:
    release("d", home=judged_home.home.path)
    partial = json.dumps([{"topic": "fleet/south/d/registry", "payload": {"op": "add"}}])
    (judged_home.home.commands / ".1-a.json.new").write_text(partial)  # left by a killed process; no bridge takes it
    rows = [SegmentRow(START + 900_000, "fleet/south/d/registry", b'{"op": "add"}', "mqtt")]
    write_segment(judged_home.home.segments, 1, rows_table(rows), bridge="bridge", last_canary_ms=None)
    correct("d", from_=str(START + 100_000), site="south", home=judged_home.home.path)
    assert [one["topic"].split("/")[-1] for one in _pending_commands(judged_home)].count("registry") == 1


@pytest.mark.parametrize("correction", [Correction(5, "new"), Correction(5, site="south"), Correction(5, gateway="h")])
def test_a_correction_before_the_first_entry_must_register_the_device(correction: Correction) -> None:
    known = [Entry(10, "add", "north", "slow"), Entry(90, "add", "west", "quick")]
    with refused("correction-before-registration"):
        corrected(known, "heard", correction)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "correction-empty"),
        ({"gateway": ""}, "correction-name-missing"),
        ({"site": ""}, "correction-name-missing"),
        ({"decommissioned": True, "registered": True}, "correction-of-decommissioned"),
        ({"decommissioned": True, "device_class": "slow"}, "correction-of-decommissioned"),
    ],
)
def test_an_impossible_correction_is_refused(judged_home: JudgedHome, options: dict[str, Any], code: str) -> None:
    with refused(code, Misuse):
        correct("d", from_=str(START), home=judged_home.home.path, **options)
    assert not [*judged_home.home.commands.glob("*.json")]


def test_the_correct_command_prints_the_end_of_the_correction(
    judged_home: JudgedHome, capsys: pytest.CaptureFixture[str]
) -> None:
    correct("d", from_=str(START + 10_000), site="south", gateway="h", registered=True, home=judged_home.home.path)
    [command] = _pending_commands(judged_home)
    assert command["topic"] == "fleet/south/d/registry"
    assert command["payload"] == {"op": "add", "class": "slow", "gateway": "h", "effective_from": START + 10_000}
    output = capsys.readouterr().out
    assert 'was at site "south", behind gateway "h", in service since 2023-11-14T22:13:30' in output
    assert "until the entry of 2023-11-14T22:13:40" in output
