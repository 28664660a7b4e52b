"""What the registry had wrong: the entry that says it, what amend makes of that, and what no entry can say."""

import fcntl
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batch.amend import AmendRequest, amend_home
from cli.commands.fleet.device import correct, release
from fleetpulse.core.errors import Misuse
from fleetpulse.core.policy import parse_policy
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


def _register(told: JudgedHome, *rows: Row) -> None:
    """Write entries to the table of the registry, as landing does."""
    landed = {"origin": "command", "bridge": "b", "segment": 1}
    plain = [{**one, **landed} for one in registry_entries(rows)]
    tables.append(told.home, DEVICES, tables.to_table(DEVICES, plain), "test", int(rows[0].received_at_ms))
    told.land_and_judge(*rows)


@pytest.fixture
def told(tmp_path: Path) -> JudgedHome:
    """A device of class slow at the site north that was heard at 30 s, and judged offline at 630 s."""
    judged = JudgedHome(empty(tmp_path / "home", DEPLOYMENT))
    judged.land_and_judge(row(0, "fleet/_/_/policy", policy=parse_policy(RULES).normalised(), effective_from_s=-1000))
    _register(judged, row(20, "fleet/north/d/registry", op="add", gateway="g", **{"class": "slow"}))
    judged.land_and_judge(signal(30), tick(800))
    return judged


def _waiting(told: JudgedHome) -> list[dict[str, Any]]:
    """Return the commands that nobody has taken."""
    return [one for path in told.home.commands.glob("*.json") for one in json.loads(path.read_text())]


def _amended(told: JudgedHome, **said: Any) -> list[dict[str, Any]]:
    """Give the command, let it be refused and amended, and return the transitions that are shown then."""
    at_s = said.pop("at_s")
    correct("d", from_=str(START + int(at_s * 1000)), home=told.home.path, **said)
    told.land_and_judge(*correction_rows(told.home, 900), tick(910))
    assert [one["message_kind"] for one in judgements.unjudged(told.home, "refused")] == ["registry"]
    [done] = amend_home(told.home, AmendRequest())
    assert done.left is None or done.corrected
    assert agrees_with_definition(told.home)
    return judgements.transitions(told.home, "d")


def test_a_device_that_was_elsewhere_keeps_its_class(told: JudgedHome) -> None:
    shown = _amended(told, at_s=100, site="south")
    assert [(one["to_mode"], one["site"], one["device_class"]) for one in shown] == [
        ("online", "north", "slow"),
        ("offline", "south", "slow"),
    ]


def test_a_device_that_was_of_another_class_stays_where_it_was(told: JudgedHome) -> None:
    _register(told, row(850, "fleet/south/d/registry", op="add", **{"class": "slow"}))
    shown = _amended(told, at_s=40, device_class="default")
    assert transitions_of(told.home)[1] == (90, "offline", "silence")
    assert [one["site"] for one in shown] == ["north", "north"]


def test_a_device_that_came_through_another_gateway(told: JudgedHome) -> None:
    assert [one["gateway"] for one in _amended(told, at_s=100, gateway="h")] == ["g", "h"]


def test_a_device_that_was_out_of_service_was_not_offline(told: JudgedHome) -> None:
    _amended(told, at_s=100, decommissioned=True)
    assert transitions_of(told.home)[1:] == [(100, "decommissioned", "decommission")]


def test_a_device_that_was_in_service_earlier_has_a_longer_life(told: JudgedHome) -> None:
    shown = _amended(told, at_s=5, registered=True)
    assert {one["life"].timestamp() for one in shown} == {START / 1000 + 5}
    assert {(one["site"], one["device_class"]) for one in shown} == {("north", "slow")}


def test_a_device_that_was_put_back_into_service_is_silent_from_then_on(told: JudgedHome) -> None:
    _register(told, row(810, "fleet/_/d/registry", op="decommission"))
    told.land_and_judge(tick(850))
    with refused("correction-after-decommission"):
        correct("d", from_=str(START + 830_000), site="south", home=told.home.path)
    with refused("correction-after-decommission"):
        correct("d", from_=str(START + 830_000), decommissioned=True, home=told.home.path)
    _amended(told, at_s=830, registered=True, site="south")
    assert transitions_of(told.home)[-1] == (830, "provisioned", "registered")


def test_of_two_entries_at_one_instant_the_correction_acts_last() -> None:
    known = [Entry(10, "add", "north", "slow", "g"), Entry(11, "add", "north"), Entry(90, "add", "west", "quick")]
    assert corrected(known, "heard", Correction(10, "new")) == Entry(12, "add", "north", "new")
    assert corrected(known, "heard", Correction(5, registered=True)) == Entry(5, "add", "north", "slow")
    assert corrected(known, "heard", Correction(95, site="east")) == Entry(95, "add", "east", "quick")
    assert corrected(known, "heard", Correction(5, "new", registered=True)) == Entry(5, "add", "north", "new")
    assert corrected([], "heard", Correction(5, gateway="h")) == Entry(5, "add", "heard", None, "h")


def test_a_correction_waits_for_what_the_registry_is_about_to_say(told: JudgedHome) -> None:
    def again() -> None:
        correct("d", from_=str(START + 100_000), device_class="quick", home=told.home.path)

    told.land_and_judge(signal(40, "e"))
    correct("d", from_=str(START + 100_000), site="south", home=told.home.path)
    correct("e", from_=str(START + 100_000), site="south", home=told.home.path)  # another device
    [path] = [path for path in told.home.commands.glob("*.json") if "/d/" in path.read_text()]
    [command] = json.loads(path.read_text())
    with refused("registry-entry-pending"):
        again()
    taken = path.rename(path.with_name(f"{path.name}.taken-1"))
    with refused("registry-entry-pending"):
        again()
    payload = json.dumps(command["payload"]).encode()
    rows = [SegmentRow(START + 900_000, command["topic"], payload, "command", command=path.name)]
    write_segment(told.home.segments, 1, rows_table(rows), bridge="bridge", last_canary_ms=None)
    taken.unlink()
    with refused("registry-entry-pending"):
        again()
    assert Landing(told.home).step() == 1
    again()
    [second] = [one for one in _waiting(told) if "/d/" in one["topic"]]
    assert second["topic"] == "fleet/south/d/registry", "it is made of the first one"
    assert second["payload"] == {"op": "add", "class": "quick", "effective_from": START + 100_001}


def test_of_two_corrections_at_once_the_second_sees_the_first(told: JudgedHome, monkeypatch: pytest.MonkeyPatch) -> None:
    first, asks, flock = threading.get_ident(), threading.Event(), fcntl.flock

    def asked(file: Any, how: int) -> None:
        opened = os.fstat(file if isinstance(file, int) else file.fileno())
        if threading.get_ident() != first and os.path.samestat(opened, told.home.commands.stat()):
            asks.set()
        flock(file, how)

    def late() -> None:
        correct("d", from_=str(START + 100_000), device_class="quick", home=told.home.path)

    with ThreadPoolExecutor(1) as others:
        with spool_lock(told.home):
            monkeypatch.setattr(fcntl, "flock", asked)
            second = others.submit(late)
            second.add_done_callback(lambda _: asks.set())
            assert asks.wait(60), "the second correction neither asks for the lock nor ends"
            assert not second.done(), "the second correction did not wait for the first"
            spool_locked(told.home, [("fleet/south/d/registry", {"op": "add", "effective_from": START + 100_000})])
        with refused("registry-entry-pending"):
            second.result(timeout=60)
    assert [one["topic"] for one in _waiting(told)] == ["fleet/south/d/registry"]


def test_a_correction_waits_neither_for_other_commands_nor_for_what_will_not_land(told: JudgedHome) -> None:
    release("d", home=told.home.path)
    begun = json.dumps([{"topic": "fleet/south/d/registry", "payload": {"op": "add"}}])
    (told.home.commands / ".1-a.json.new").write_text(begun)  # by who was killed: nobody will take it
    rows = [SegmentRow(START + 900_000, "fleet/south/d/registry", b'{"op": "add"}', "mqtt")]
    write_segment(told.home.segments, 1, rows_table(rows), bridge="bridge", last_canary_ms=None)
    correct("d", from_=str(START + 100_000), site="south", home=told.home.path)
    assert [one["topic"].split("/")[-1] for one in _waiting(told)].count("registry") == 1


@pytest.mark.parametrize("wanted", [Correction(5, "new"), Correction(5, site="south"), Correction(5, gateway="h")])
def test_before_its_first_entry_a_device_is_not_registered_unasked(wanted: Correction) -> None:
    known = [Entry(10, "add", "north", "slow"), Entry(90, "add", "west", "quick")]
    with refused("correction-before-registration"):
        corrected(known, "heard", wanted)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, "the correction is empty; .* a device with another id is another device"),
        ({"gateway": ""}, "cannot be removed"),
        ({"site": ""}, "have a name"),
        ({"decommissioned": True, "registered": True}, "use --decommissioned alone"),
        ({"decommissioned": True, "device_class": "slow"}, "use --decommissioned alone"),
    ],
)
def test_what_no_entry_can_say_is_refused_with_what_can(told: JudgedHome, said: dict[str, Any], why: str) -> None:
    with pytest.raises(Misuse, match=why):
        correct("d", from_=str(START), home=told.home.path, **said)
    assert not [*told.home.commands.glob("*.json")]


def test_the_command_says_until_when_the_correction_counts(told: JudgedHome, capsys: pytest.CaptureFixture[str]) -> None:
    correct("d", from_=str(START + 10_000), site="south", gateway="h", registered=True, home=told.home.path)
    [command] = _waiting(told)
    assert command["topic"] == "fleet/south/d/registry"
    assert command["payload"] == {"op": "add", "class": "slow", "gateway": "h", "effective_from": START + 10_000}
    said = capsys.readouterr().out
    assert 'was at site "south", behind gateway "h", in service since 2023-11-14T22:13:30' in said
    assert "until the entry of 2023-11-14T22:13:40" in said
