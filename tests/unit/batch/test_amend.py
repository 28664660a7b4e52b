"""What amend says, sends and refuses."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake

from batch.amend import Amended, AmendRequest, amend_and_settle, amend_home
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
from fleetpulse.core.times import parse_instant_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance.compaction import DAY_MS
from fleetpulse.io.tables import tables
from fleetpulse.reports import judgements, time_travel
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.amended import DEPLOYMENT, RULES, agrees_with_definition, correction_rows, transitions_of
from tests.support.homes.homes import JudgedHome, apply_retention, commit_batch, empty
from tests.support.refusals import refused


@pytest.fixture
def judged(tmp_path: Path) -> JudgedHome:
    """A device that was judged offline at 70 s, and whose messages of 40 and 90 s came at 110 s."""
    judged = JudgedHome(empty(tmp_path / "home", DEPLOYMENT))
    policy = row(0, "fleet/_/_/policy", policy=parse_policy(RULES).normalised(), effective_from_s=-1000)
    judged.land_and_judge(policy, signal(10), tick(100))
    judged.land_and_judge(signal(40, received_s=110, gateway="gw"), signal(90, received_s=110, gateway="gw"), tick(120))
    return judged


def test_an_offline_that_late_delivery_takes_back_is_shown_as_retracted(judged: JudgedHome) -> None:
    home = judged.home
    assert transitions_of(home) == [(10, "online", "signal"), (70, "offline", "silence")]
    [done] = amend_home(home, AmendRequest())
    assert (done.retracted, done.added, done.corrected) == (1, 0, True)
    assert transitions_of(home) == [(10, "online", "signal")]
    assert agrees_with_definition(home)
    standing = judgements.device_status(home, "d", START + 120_000)
    assert standing is not None
    assert standing.retracted_offline == [{"since_ms": START + 70_000, "until_ms": None}]
    assert standing.summary["mode"] == "online"
    everything = judgements.transitions(home, everything=True)
    assert [(one["kind"], one["amendment_no"], one["transition_no"]) for one in everything] == [
        ("transition", None, 1),
        ("retract", 1, 2),
        ("transition", None, 2),
    ]


def test_what_was_known_before_an_amend_and_what_is_known_now_can_both_be_looked_at(judged: JudgedHome) -> None:
    amend_home(judged.home, AmendRequest())

    def mode(moment: time_travel.Moment) -> list[str]:
        return [one["mode"] for one in time_travel.fleet(judged.home, moment)]

    assert mode(time_travel.Moment(START + 100_000)) == ["online"]
    assert mode(time_travel.Moment(START + 100_000, known_ms=START + 200_000)) == ["offline"]


def test_a_corrected_device_goes_on_as_its_amended_history_and_then_there_is_nothing_left(judged: JudgedHome) -> None:
    home = judged.home
    amend_home(home, AmendRequest())
    judged.land_and_judge(*correction_rows(home, 121), tick(200))
    assert transitions_of(home) == [(10, "online", "signal"), (129, "online", "amended"), (150, "offline", "silence")]
    assert amend_home(home, AmendRequest()) == [Amended("d", 1, 0, corrected=False, left=None)]
    assert transitions_of(home) == [(10, "online", "signal"), (150, "offline", "silence")]
    assert agrees_with_definition(home)
    standing = judgements.device_status(home, "d", START + 200_000)
    assert standing is not None
    assert standing.retracted_offline == [{"since_ms": START + 70_000, "until_ms": START + 129_000}]
    assert amend_home(home, AmendRequest()) == []
    assert not correction_rows(home, 201)


def test_an_amend_that_waits_for_its_correction_is_done_with_the_device(judged: JudgedHome) -> None:
    home = judged.home

    def course(instant_ms: int) -> bool:
        assert instant_ms == START + 129_000
        judged.land_and_judge(*correction_rows(home, 121), tick(200))
        return True

    assert amend_and_settle(home, AmendRequest(), course) == [Amended("d", 2, 0, corrected=True, left=None)]
    assert transitions_of(home) == [(10, "online", "signal"), (150, "offline", "silence")]
    assert amend_home(home, AmendRequest()) == []


def test_an_amend_whose_correction_is_not_judged_in_time_says_what_is_left(judged: JudgedHome) -> None:
    [done] = amend_and_settle(judged.home, AmendRequest(), lambda _: False)
    assert (done.retracted, done.corrected, done.left is None) == (1, True, False)
    assert amend_and_settle(judged.home, AmendRequest(dry_run=True), lambda _: pytest.fail("nothing was sent"))


def test_a_stopped_fleet_is_not_waited_for(judged: JudgedHome, capsys: pytest.CaptureFixture[str]) -> None:
    amend_by_command(judged.home.path, again_within="10h", json_lines=True)
    [done] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (done["corrected"], done["left"] is None) == (True, False)
    assert parse_instant_ms(done["effective_from"]) == START + 129_000
    judged.land_and_judge(*correction_rows(judged.home, 121), tick(200))
    amend_by_command(judged.home.path, again_within="10h", json_lines=True)
    assert json.loads(capsys.readouterr().out)["left"] is None


def test_amending_again_says_nothing_new_and_sends_no_second_correction(judged: JudgedHome) -> None:
    home = judged.home
    amend_home(home, AmendRequest())
    version = tables.version(home.table(JUDGEMENTS.name))
    again = amend_home(home, AmendRequest())
    assert [(one.retracted, one.added, one.corrected, one.left is None) for one in again] == [(0, 0, False, False)]
    assert tables.version(home.table(JUDGEMENTS.name)) == version
    assert len(correction_rows(home, 121)) == 1


def test_a_dry_run_says_what_would_be_done_and_does_nothing(judged: JudgedHome) -> None:
    home = judged.home
    version = tables.version(home.table(JUDGEMENTS.name))
    [done] = amend_home(home, AmendRequest(dry_run=True))
    assert (done.retracted, done.corrected) == (1, True)
    assert (tables.version(home.table(JUDGEMENTS.name)), correction_rows(home, 121)) == (version, [])


def test_where_nothing_came_late_it_is_written_down_once_that_all_is_done_with(tmp_path: Path) -> None:
    judged = JudgedHome(empty(tmp_path / "home", DEPLOYMENT))
    assert amend_home(judged.home, AmendRequest()) == []
    judged.land_and_judge(signal(10), tick(100))
    version = tables.version(judged.home.table(JUDGEMENTS.name))
    for _ in range(2):
        assert amend_home(judged.home, AmendRequest()) == []
        assert tables.version(judged.home.table(JUDGEMENTS.name)) == version + 1


def test_what_came_late_and_changes_nothing_is_done_with(tmp_path: Path) -> None:
    judged = JudgedHome(empty(tmp_path / "home", DEPLOYMENT))
    judged.land_and_judge(signal(10, gateway="gw"), signal(40), signal(20, received_s=50, gateway="gw"), tick(55))
    assert amend_home(judged.home, AmendRequest()) == [Amended("d", 0, 0, corrected=False, left=None)]
    assert amend_home(judged.home, AmendRequest()) == []
    assert len(amend_home(judged.home, AmendRequest(since_ms=START))) == 1
    assert len(amend_home(judged.home, AmendRequest(device_ids=("d", "e")))) == 2


def test_a_correction_of_a_device_that_has_moved_on_is_refused_and_made_anew(judged: JudgedHome) -> None:
    home = judged.home
    amend_home(home, AmendRequest())
    judged.land_and_judge(
        *correction_rows(home, 121), signal(125), tick(140)
    )  # heard before the correction is in effect, and unknown when it was made
    reasons = [one["reason"] for one in judgements.unjudged(home, "refused")]
    assert reasons == ["the device has moved on since this was worked out: amend again"]
    [done] = amend_home(home, AmendRequest())
    assert done.corrected
    assert agrees_with_definition(home)
    judged.land_and_judge(*correction_rows(home, 141), tick(180))
    [done] = amend_home(home, AmendRequest())
    assert done.left is None
    assert agrees_with_definition(home)


def test_a_correction_that_comes_when_its_time_was_judged_is_refused(judged: JudgedHome) -> None:
    home = judged.home
    amend_home(home, AmendRequest())
    judged.land_and_judge(*correction_rows(home, 180), tick(181))
    assert [one["reason"] for one in judgements.unjudged(home, "refused")] == ["effective_from lies in what has been judged"]


def test_a_corrected_entry_of_the_registry_is_judged_from_its_own_instant(judged: JudgedHome) -> None:
    home = judged.home
    judged.land_and_judge(
        signal(130, "e"), tick(200), row(210, "e/registry", op="add", effective_from_s=120, **{"class": "slow"}), tick(220)
    )
    assert transitions_of(home, "e") == [(130, "online", "signal"), (190, "offline", "silence")]
    done = {one.device_id: one for one in amend_home(home, AmendRequest())}
    assert (done["e"].retracted, done["e"].added) == (2, 1)  # it is of another class from its first row on, 10 s earlier
    assert transitions_of(home, "e") == [(130, "online", "signal")]
    assert agrees_with_definition(home, "e")
    standing = judgements.device_status(home, "e", START + 220_000)
    assert standing is not None
    assert standing.retracted_offline == [], "it was heard by then: its timeout was another"


def test_a_device_whose_verdicts_do_not_follow_from_bronze_is_left_alone(judged: JudgedHome) -> None:
    home = judged.home
    stray = {"kind": "transition", "device_id": "d", "event_time_ms": START + 30_000, "life_ms": START, "transition_no": 7}
    write_deltalake(str(home.table(JUDGEMENTS.name)), tables.to_table(JUDGEMENTS, [stray]), mode="append")
    [done] = amend_home(home, AmendRequest())
    assert (done.retracted, done.added, done.corrected) == (0, 0, False)
    assert done.left is not None
    assert "do not follow from the rows that bronze still has" in done.left


def test_a_device_whose_rows_retention_has_removed_is_listed_once_and_does_not_hold_others_back(tmp_path: Path) -> None:
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
    done = amend_home(judged.home, AmendRequest())
    assert [(one.device_id, one.final, one.corrected, one.retracted) for one in done] == [
        ("d", True, False, 0),
        ("odd", False, False, 0),
    ]
    for one, why in zip(done, ("are gone", "its verdicts do not follow from the rows that bronze still has"), strict=True):
        assert why in (one.left or "")
    assert [one.device_id for one in amend_home(judged.home, AmendRequest())] == ["odd"], (
        "its rows are all there: it is looked at again"
    )


def test_whoever_waits_is_told_of_each_group_of_devices(
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
    assert progress.splitlines() == ["devices to amend: 5", *(f"devices done: {done} of 5" for done in (2, 4, 5))]
    monkeypatch.undo()
    amend_by_command(judged.home.path, dry_run=True, json_lines=True)
    progress = capsys.readouterr().err
    assert progress.splitlines() == ["devices to amend: 5", "devices done: 5 of 5"], "it took no time"


def test_two_amends_do_not_work_at_once(judged: JudgedHome) -> None:
    with (judged.home.path / "amend.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with refused("amend-runs-already"):
            amend_home(judged.home, AmendRequest())


def test_a_table_of_an_older_version_is_refused_and_not_changed(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    older = tables.to_table(JUDGEMENTS, []).drop_columns(["amendment_no", "takes_back"])
    write_deltalake(str(home.table(JUDGEMENTS.name)), older)
    commit_batch(home.checkpoint, 1, START)
    with refused("judgements-of-older-version"):
        amend_home(home, AmendRequest())
    assert tables.version(home.table(JUDGEMENTS.name)) == 0


def test_while_a_gap_is_open_no_correction_is_sent(judged: JudgedHome) -> None:
    judged.land_and_judge(row(120.5, "fleet/_/b/gap", op="open", from_s=120, after_s=120))
    [done] = amend_home(judged.home, AmendRequest())
    assert not done.corrected
    assert done.left is not None
    assert "no bridge is listening" in done.left


def test_a_corrected_class_names_the_site_that_the_device_has_and_an_instant_in_the_past(judged: JudgedHome) -> None:
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
    refused = decode("fleet/_/d/correct", b"{}", START, origin)
    assert isinstance(refused, Rejection)
    assert refused.reason == "reserved"


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
        {"death_ms": START + 9_000},  # without how long ago that is in covered time
        {"quiet_for_ms": 7_200_000},  # silent for longer than it may be, and still online
    ],
)
def test_whatever_a_row_that_corrects_carries_the_fold_lives_on(device: Any) -> None:
    rows = [signal(10), tick(30)]
    known = outcome(rows, DEPLOYMENT, through_ms=START + 24_999)
    was = fingerprint(known.devices["d"], 25_000 - 10_000, START + 25_000)
    whole = encode_device(known.devices["d"], 0)
    carried = {**whole, **device} if isinstance(device, dict) and device.keys() <= whole.keys() and device else device
    row_ = row(20, "fleet/_/d/correct", was=was, device=carried, effective_from_s=25)
    assert row_.kind is Kind.CORRECT
    judged = replay([*rows, row_], DEPLOYMENT)
    refused = [one for one in judged if one.kind is JudgementKind.REFUSED]
    forgotten = [one for one in judged if one.to_mode == "forgotten"]
    assert len(forgotten) == (carried is None)
    assert len(refused) == (carried is not None)


def test_a_device_comes_back_as_it_was_told() -> None:
    errors = [signal(at, kind="error", code=code) for at, code in ((10, "x"), (11, "reconnaissance"), (12, "auth_failed"))]
    known = outcome([*errors, row(20, "d/death"), tick(30)], DEPLOYMENT).devices["d"]
    assert decode_device("d", json.loads(json.dumps(encode_device(known, 99_000))), lambda _: 99_000) == known
