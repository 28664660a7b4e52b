"""Amend: emitted amendments, correction rows and refusals."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake

from batch.amend import (
    Amended,
    AmendRequest,
    _concerned,  # pyright: ignore[reportPrivateUsage]
    amend_and_settle,
    amend_home,
)
from cli.commands.batch.amend import amend as amend_by_command
from cli.commands.fleet.device import correct
from fleetpulse.core.errors import Misuse
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.messages.decode import Rejection, decode
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.registry.device_patch import decode_device, encode_device, fingerprint
from fleetpulse.core.replay import outcome, replay
from fleetpulse.core.rows import Kind, Origin
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.core.times import DAY_MS, MINUTE_MS, parse_instant_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports import judgements
from fleetpulse.reports.history import time_travel
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.amended import DEPLOYMENT, RULES, agrees_with_definition, correction_rows, transitions_of
from tests.support.homes.homes import JudgedHome, apply_retention, commit_batch, empty
from tests.support.refusals import refused


@pytest.fixture
def judged(tmp_path: Path) -> JudgedHome:
    """Judge a device offline at 70 s; its messages of 40 s and 90 s are received at 110 s."""
    judged = JudgedHome(empty(tmp_path / "home", DEPLOYMENT))
    policy = row(0, "fleet/_/_/policy", policy=parse_policy(RULES).normalised(), effective_from_s=-1000)
    judged.land_and_judge(policy, signal(10), tick(100))
    judged.land_and_judge(signal(40, received_s=110, gateway="gw"), signal(90, received_s=110, gateway="gw"), tick(120))
    return judged


def test_offline_refuted_by_late_messages_is_shown_as_retracted(judged: JudgedHome) -> None:
    home = judged.home
    assert transitions_of(home) == [(10, "online", "signal"), (70, "offline", "silence")]
    [result] = amend_home(home, AmendRequest())
    assert (result.retracted, result.added, result.corrected) == (1, 0, True)
    assert transitions_of(home) == [(10, "online", "signal")]
    assert agrees_with_definition(home)
    status = judgements.device_status(home, "d", START + 120_000)
    assert status is not None
    assert status.retracted_offline == [{"since_ms": START + 70_000, "until_ms": None}]
    assert status.summary["mode"] == "online"
    everything = judgements.transitions(home, everything=True)
    assert [(one["kind"], one["amendment_no"], one["transition_no"]) for one in everything] == [
        ("transition", None, 1),
        ("retract", 1, 2),
        ("transition", None, 2),
    ]


def test_time_travel_shows_the_modes_before_and_after_an_amend(judged: JudgedHome) -> None:
    amend_home(judged.home, AmendRequest())

    def modes_at(moment: time_travel.Moment) -> list[str]:
        return [one["mode"] for one in time_travel.fleet(judged.home, moment)]

    assert modes_at(time_travel.Moment(START + 100_000)) == ["online"]
    assert modes_at(time_travel.Moment(START + 100_000, known_ms=START + 200_000)) == ["offline"]


def test_corrected_device_continues_from_its_amended_history(judged: JudgedHome) -> None:
    home = judged.home
    amend_home(home, AmendRequest())
    judged.land_and_judge(*correction_rows(home, 121), tick(200))
    assert transitions_of(home) == [(10, "online", "signal"), (129, "online", "amended"), (150, "offline", "silence")]
    assert amend_home(home, AmendRequest()) == [Amended("d", 1, 0, corrected=False, left=None)]
    assert transitions_of(home) == [(10, "online", "signal"), (150, "offline", "silence")]
    assert agrees_with_definition(home)
    status = judgements.device_status(home, "d", START + 200_000)
    assert status is not None
    assert status.retracted_offline == [{"since_ms": START + 70_000, "until_ms": START + 129_000}]
    assert amend_home(home, AmendRequest()) == []
    assert not correction_rows(home, 201)


def test_amend_that_waits_for_its_correction_finishes_the_device(judged: JudgedHome) -> None:
    home = judged.home

    def judge_correction(instant_ms: int) -> bool:
        assert instant_ms == START + 129_000
        judged.land_and_judge(*correction_rows(home, 121), tick(200))
        return True

    assert amend_and_settle(home, AmendRequest(), judge_correction) == [Amended("d", 2, 0, corrected=True, left=None)]
    assert transitions_of(home) == [(10, "online", "signal"), (150, "offline", "silence")]
    assert amend_home(home, AmendRequest()) == []


def test_amend_reports_a_correction_that_is_not_judged_in_time(judged: JudgedHome) -> None:
    [result] = amend_and_settle(judged.home, AmendRequest(), lambda _: False)
    assert (result.retracted, result.corrected, result.left is None) == (1, True, False)
    assert amend_and_settle(judged.home, AmendRequest(dry_run=True), lambda _: pytest.fail("a dry run sends no correction"))


def test_amend_command_does_not_wait_for_a_stopped_fleet(judged: JudgedHome, capsys: pytest.CaptureFixture[str]) -> None:
    amend_by_command(judged.home.path, again_within="10h", json_lines=True)
    [result] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (result["corrected"], result["left"] is None) == (True, False)
    assert parse_instant_ms(result["effective_from"]) == START + 129_000
    judged.land_and_judge(*correction_rows(judged.home, 121), tick(200))
    amend_by_command(judged.home.path, again_within="10h", json_lines=True)
    assert json.loads(capsys.readouterr().out)["left"] is None


def test_repeated_amend_emits_nothing_and_sends_no_second_correction(judged: JudgedHome) -> None:
    home = judged.home
    amend_home(home, AmendRequest())
    version = tables.version(home.table(JUDGEMENTS.name))
    again = amend_home(home, AmendRequest())
    assert [(one.retracted, one.added, one.corrected, one.left is None) for one in again] == [(0, 0, False, False)]
    assert tables.version(home.table(JUDGEMENTS.name)) == version
    assert len(correction_rows(home, 121)) == 1


def test_dry_run_reports_the_plan_and_changes_nothing(judged: JudgedHome) -> None:
    home = judged.home
    version = tables.version(home.table(JUDGEMENTS.name))
    [result] = amend_home(home, AmendRequest(dry_run=True))
    assert (result.retracted, result.corrected) == (1, True)
    assert (tables.version(home.table(JUDGEMENTS.name)), correction_rows(home, 121)) == (version, [])


def test_amend_without_late_messages_records_its_progress_once(tmp_path: Path) -> None:
    judged = JudgedHome(empty(tmp_path / "home", DEPLOYMENT))
    assert amend_home(judged.home, AmendRequest()) == []
    judged.land_and_judge(signal(10), tick(100))
    version = tables.version(judged.home.table(JUDGEMENTS.name))
    for _ in range(2):
        assert amend_home(judged.home, AmendRequest()) == []
        assert tables.version(judged.home.table(JUDGEMENTS.name)) == version + 1


def test_late_message_that_changes_nothing_is_processed_once(tmp_path: Path) -> None:
    judged = JudgedHome(empty(tmp_path / "home", DEPLOYMENT))
    judged.land_and_judge(signal(10, gateway="gw"), signal(40), signal(20, received_s=50, gateway="gw"), tick(55))
    assert amend_home(judged.home, AmendRequest()) == [Amended("d", 0, 0, corrected=False, left=None)]
    assert amend_home(judged.home, AmendRequest()) == []
    assert len(amend_home(judged.home, AmendRequest(since_ms=START))) == 1
    assert len(amend_home(judged.home, AmendRequest(device_ids=("d", "e")))) == 2


def test_correction_is_refused_and_replaced_if_the_device_has_newer_signals(judged: JudgedHome) -> None:
    home = judged.home
    amend_home(home, AmendRequest())
    judged.land_and_judge(
        *correction_rows(home, 121), signal(125), tick(140)
    )  # received after the correction was made, before it takes effect
    reasons = [one["reason"] for one in judgements.unjudged(home, "refused")]
    assert reasons == ["the device has changed since the correction was computed; amend again"]
    [result] = amend_home(home, AmendRequest())
    assert result.corrected
    assert agrees_with_definition(home)
    judged.land_and_judge(*correction_rows(home, 141), tick(180))
    [result] = amend_home(home, AmendRequest())
    assert result.left is None
    assert agrees_with_definition(home)


def test_correction_received_after_its_effective_time_was_judged_is_refused(judged: JudgedHome) -> None:
    home = judged.home
    amend_home(home, AmendRequest())
    judged.land_and_judge(*correction_rows(home, 180), tick(181))
    assert [one["reason"] for one in judgements.unjudged(home, "refused")] == ["effective_from must lie beyond the frontier"]


def test_amend_applies_a_corrected_registry_entry_from_its_effective_time(judged: JudgedHome) -> None:
    home = judged.home
    judged.land_and_judge(
        signal(130, "e"), tick(200), row(210, "e/registry", op="add", effective_from_s=120, **{"class": "slow"}), tick(220)
    )
    assert transitions_of(home, "e") == [(130, "online", "signal"), (190, "offline", "silence")]
    results = {one.device_id: one for one in amend_home(home, AmendRequest())}
    assert (results["e"].retracted, results["e"].added) == (2, 1)  # the other class applies from 120 s on, before the first row
    assert transitions_of(home, "e") == [(130, "online", "signal")]
    assert agrees_with_definition(home, "e")
    status = judgements.device_status(home, "e", START + 220_000)
    assert status is not None
    assert status.retracted_offline == [], "with the longer timeout of its class it stays online"


def test_amend_skips_a_device_whose_verdicts_do_not_follow_from_bronze(judged: JudgedHome) -> None:
    home = judged.home
    stray = {"kind": "transition", "device_id": "d", "event_time_ms": START + 30_000, "life_ms": START, "transition_no": 7}
    write_deltalake(str(home.table(JUDGEMENTS.name)), tables.to_table(JUDGEMENTS, [stray]), mode="append")
    [result] = amend_home(home, AmendRequest())
    assert (result.retracted, result.added, result.corrected) == (0, 0, False)
    assert result.left is not None
    assert "do not follow from the rows that bronze still has" in result.left


@pytest.mark.parametrize(
    ("received_ms", "until_ms", "concerned"),
    [(-5_000, 0, False), (-5_000, 1, True), (-90_000, 1, False), (0, 5_000, True)],
    ids=["read before", "read since", "of an earlier minute", "of this minute"],
)
def test_row_for_several_late_messages_concerns_its_device_until_the_last(
    received_ms: int, until_ms: int, concerned: bool, judged: JudgedHome
) -> None:
    done_ms = START // MINUTE_MS * MINUTE_MS + 30_000
    row = {"kind": "late", "message_kind": "error", "device_id": "several", "messages": 9, "event_time_ms": START}
    row |= {"received_at_ms": done_ms + received_ms, "received_until_ms": done_ms + until_ms}
    write_deltalake(str(judged.home.table(JUDGEMENTS.name)), tables.to_table(JUDGEMENTS, [row]), mode="append")
    assert ("several" in _concerned(judged.home, AmendRequest(), done_ms, done_ms + DAY_MS)) == concerned


def test_device_with_removed_rows_is_reported_once_and_blocks_no_other(tmp_path: Path) -> None:
    judged, later_s = JudgedHome(empty(tmp_path / "home", DEPLOYMENT)), 3 * DAY_MS // 1000
    rules = {"rules": {"timeout": "60s", "forget_after": "30d"}}
    policy = row(0, "fleet/_/_/policy", policy=parse_policy(rules).normalised(), effective_from_s=-1000)
    judged.land_and_judge(policy, signal(10), signal(30), tick(100))
    judged.land_and_judge(
        signal(later_s + 10),
        signal(later_s + 30),
        signal(later_s + 20, received_s=later_s + 40, gateway="gw"),
        tick(later_s + 50),
    )
    assert apply_retention(judged.home, 2, DAY_MS)
    after_ms = START + (later_s + 45) * 1000
    odd = {"kind": "transition", "device_id": "odd", "event_time_ms": after_ms, "life_ms": after_ms, "transition_no": 7}
    late = {"kind": "late", "device_id": "odd", "received_at_ms": after_ms}
    table = str(judged.home.table(JUDGEMENTS.name))
    write_deltalake(table, tables.to_table(JUDGEMENTS, [odd, late]), mode="append")
    results = amend_home(judged.home, AmendRequest())
    assert [(one.device_id, one.final, one.corrected, one.retracted) for one in results] == [
        ("d", True, False, 0),
        ("odd", False, False, 0),
    ]
    for one, reason in zip(
        results, ("were removed", "its verdicts do not follow from the rows that bronze still has"), strict=True
    ):
        assert reason in (one.left or "")
    assert [one.device_id for one in amend_home(judged.home, AmendRequest())] == ["odd"], (
        "bronze has all its rows, so it is processed again"
    )


def test_amend_command_reports_progress_for_each_group_of_devices(
    judged: JudgedHome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("batch.amend._AT_ONCE", 2)
    monkeypatch.setattr("batch.common.progress.EVERY_S", 0)
    names = ("e", "f", "g", "h")
    judged.land_and_judge(*(signal(125, name) for name in names), tick(200))
    judged.land_and_judge(*(signal(130, name, received_s=210, gateway="gw") for name in names), tick(220))
    amend_by_command(judged.home.path, dry_run=True, json_lines=True)
    out, progress = capsys.readouterr()
    assert len(out.splitlines()) == 5
    assert progress.splitlines() == ["devices to amend: 5", *(f"devices done: {count} of 5" for count in (2, 4, 5))]
    monkeypatch.undo()
    amend_by_command(judged.home.path, dry_run=True, json_lines=True)
    progress = capsys.readouterr().err
    assert progress.splitlines() == ["devices to amend: 5", "devices done: 5 of 5"], "a fast run reports only its start and end"


def test_second_amend_is_refused_while_one_runs(judged: JudgedHome) -> None:
    with (judged.home.path / "amend.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with refused("amend-runs-already"):
            amend_home(judged.home, AmendRequest())


def test_amend_refuses_a_judgements_table_of_an_older_version(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    older = tables.to_table(JUDGEMENTS, []).drop_columns(["amendment_no", "takes_back"])
    write_deltalake(str(home.table(JUDGEMENTS.name)), older)
    commit_batch(home.checkpoint, 1, START)
    with refused("judgements-of-older-version"):
        amend_home(home, AmendRequest())
    assert tables.version(home.table(JUDGEMENTS.name)) == 0


def test_amend_sends_no_correction_during_a_coverage_gap(judged: JudgedHome) -> None:
    judged.land_and_judge(row(120.5, "fleet/_/b/gap", op="open", from_s=120, after_s=120))
    [result] = amend_home(judged.home, AmendRequest())
    assert not result.corrected
    assert result.left is not None
    assert "no bridge is listening" in result.left


def test_correct_command_keeps_the_site_and_requires_a_past_instant(judged: JudgedHome) -> None:
    home = judged.home
    correct("d", device_class="slow", from_="1700000000000", home=home.path)
    [command] = [one for path in home.commands.glob("*.json") for one in json.loads(path.read_text())]
    assert command["topic"] == "fleet/site/d/registry"
    assert command["payload"] == {"op": "add", "class": "slow", "effective_from": START}
    with refused("correction-not-past", Misuse):
        correct("d", device_class="slow", from_="9999-01-01T00:00:00Z", home=home.path)
    with refused("device-unknown"):
        correct("x", device_class="slow", from_="1700000000000", home=home.path)


@pytest.mark.parametrize("origin", [Origin.MQTT, Origin.REPLAY])
def test_neither_a_client_nor_a_recording_can_correct_a_device(origin: Origin) -> None:
    rejection = decode("fleet/_/d/correct", b"{}", START, origin)
    assert isinstance(rejection, Rejection)
    assert rejection.reason == "reserved"


@pytest.mark.parametrize(
    "device",
    [
        None,
        7,
        [],
        {},
        {"mode": "gone"},
        "x",
        *({name: value} for name in ("mode", "seq", "codes") for value in (-1, "é\n", {})),
        *({name: 2**63 - 1} for name in ("transition_no", "reboots", "runtime_ms", "quiet_for_ms", "held_until_ms")),
        {"seq": 2**63},
        *({name: "x" * 257} for name in ("site", "device_class", "boot")),
        {"gateway": "x" * 386},
        {"codes": ["x" * 257]},
        {"death_ms": START + 9_000},  # without its age in covered time
        {"quiet_for_ms": 7_200_000},  # silent beyond the timeout, but still online
    ],
)
def test_fold_survives_any_content_of_a_correction_row(device: Any) -> None:
    rows = [signal(10), tick(30)]
    known = outcome(rows, DEPLOYMENT, through_ms=START + 24_999)
    was = fingerprint(known.devices["d"], 25_000 - 10_000, START + 25_000)
    encoded = encode_device(known.devices["d"], 0)
    carried = {**encoded, **device} if isinstance(device, dict) and device.keys() <= encoded.keys() and device else device
    correction = row(20, "fleet/_/d/correct", was=was, device=carried, effective_from_s=25)
    assert correction.kind is Kind.CORRECT
    judged = replay([*rows, correction], DEPLOYMENT)
    refusals = [one for one in judged if one.kind is JudgementKind.REFUSED]
    forgotten = [one for one in judged if one.to_mode == "forgotten"]
    assert len(forgotten) == (carried is None)
    assert len(refusals) == (carried is not None)


def test_device_encoding_round_trips() -> None:
    errors = [signal(at, kind="error", code=code) for at, code in ((10, "x"), (11, "reconnaissance"), (12, "auth_failed"))]
    known = outcome([*errors, row(20, "d/death"), tick(30)], DEPLOYMENT).devices["d"]
    assert decode_device("d", json.loads(json.dumps(encode_device(known, 99_000))), lambda _: 99_000) == known
