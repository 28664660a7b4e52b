"""Amend where retention has removed the beginning: from a snapshot, or not at all, and never by guessing."""

import shutil
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake

from batch import amend as job
from batch.amend import Amended, AmendRequest, amend_home
from cli.commands.batch.amend import amend as amend_by_command
from fleetpulse.core.amendments import ReplayOrigin, corrections
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.replay import outcome
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, JUDGEMENTS
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.amend_progress import AmendProgress, write_amend_progress
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms, promise
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import snapshots
from fleetpulse.reports import judgements
from fleetpulse.reports.device_judgements import judgements_by_device
from fleetpulse.reports.replay_origin import Begun, OriginChoice, applicable_amend_progress, choose_origins
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.amended import correction_rows, transitions_of
from tests.support.homes.maintained import KEEP, run_maintain
from tests.support.homes.retained import DAY_MS, DEPLOYMENT, day, late, two_days
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
FEW_LATE = replace(KEEP, late_ms=DAY_MS)


def said(home: Home, kind: str, *days: int) -> None:
    """Write down that messages of a device nobody asks about were not judged."""
    rows = [
        {"kind": kind, "device_id": "x", "received_at_ms": START + one * DAY_MS, "judged_at_ms": START + one * DAY_MS}
        for one in days
    ]
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), kind, days[0] + 1)


def test_what_came_late_is_amended_from_a_snapshot_as_from_the_whole_history(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    kept.land_and_judge(*late(day(1, 3000), day(1, 6000), received_s=day(3, 10)), tick(day(3, 20)))
    shutil.copytree(kept.home.path, tmp_path / "whole")
    kept.forget()
    [done] = amend_home(kept.home, AmendRequest())
    assert (done.retracted, done.added, done.corrected) == (1, 1, True)
    assert kept.agrees()
    assert transitions_of(kept.home)[-2:] == [(day(1, 10), "online", "signal"), (day(1, 9600), "offline", "silence")]
    whole = Home(tmp_path / "whole")
    assert amend_home(whole, AmendRequest()) == [done]
    assert Counter(judgements_by_device(whole, ["d"])["d"]) == Counter(judgements_by_device(kept.home, ["d"])["d"])
    [one], [other] = correction_rows(kept.home, day(3, 21)), correction_rows(whole, day(3, 21))
    assert one.contents() == other.contents()
    kept.land_and_judge(one, tick(day(3, 60)))
    assert amend_home(kept.home, AmendRequest()) == [Amended("d", 0, 0, corrected=False, left=None)]
    assert amend_home(kept.home, AmendRequest()) == []
    assert kept.agrees()


def test_while_bronze_is_whole_it_begins_with_a_snapshot_where_one_reaches_what_came_late(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    kept.land_and_judge(*late(day(1, 3000), received_s=day(3, 10)), tick(day(3, 20)))
    newest_ms = kept.rows[-1].received_at_ms
    assert choose_origins(kept.home, ["d"], newest_ms).begun == {Begun(snapshots(kept.home)[0]): ["d"]}
    kept.land_and_judge(*late(50, received_s=day(3, 30)), tick(day(3, 40)))
    assert choose_origins(kept.home, ["d"], kept.rows[-1].received_at_ms) == OriginChoice({Begun(): ["d"]}, {})


def test_who_is_broken_off_goes_on_behind_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = two_days(tmp_path / "home")
    for number, device in enumerate(("k", "l", "m")):
        kept.land_and_judge(
            signal(day(3, 100 + number), device), signal(day(3, 50), device, received_s=day(3, 200 + number), gateway="gw")
        )
    kept.land_and_judge(tick(day(3, 300)))
    monkeypatch.setattr(job, "_AT_ONCE", 1)
    some, looked = job._amend_some, list[str]()

    def breaks_off(home: Home, group: Any, through_ms: int, wanted: AmendRequest) -> list[Amended]:
        looked.extend(group.device_ids)
        if len(looked) == 3:
            raise FleetError("broken off")
        return [Amended(device_id, 0, 0, corrected=False, left=None) for device_id in group.device_ids]

    monkeypatch.setattr(job, "_amend_some", breaks_off)
    with pytest.raises(FleetError, match="broken off"):
        amend_home(kept.home, AmendRequest())
    monkeypatch.setattr(job, "_amend_some", some)
    assert (looked, [one.device_id for one in amend_home(kept.home, AmendRequest())]) == (["k", "l", "m"], ["m"])


def test_a_refusal_names_what_was_not_done_with_when_each_snapshot_was_taken(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    kept.land_and_judge(*late(day(1, 8500), received_s=day(3, 10)), tick(day(3, 20)))
    kept.snapshot()
    kept.land_and_judge(*late(day(3, 12), received_s=day(3, 30)), *late(day(1, 20), received_s=day(3, 30.5)), tick(day(3, 40)))
    kept.forget()
    [why] = choose_origins(kept.home, ["d"], kept.rows[-1].received_at_ms).why.values()
    assert "at 2023-11-17T22:13:50.500Z reaches back to 2023-11-15T22:13:40.000Z" in why, "neither of the two serves for it"


def test_a_corrected_entry_of_the_registry_is_amended_from_a_snapshot_too(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    entry = row(day(3, 10), "d/registry", op="add", effective_from_s=day(1, 200), **{"class": "slow"})
    kept.land_and_judge(entry, tick(day(3, 20)))
    kept.forget()
    [done] = amend_home(kept.home, AmendRequest())
    assert (done.retracted, done.added) == (1, 1)
    assert kept.agrees()
    assert transitions_of(kept.home)[-1] == (day(1, 7300), "offline", "silence")


def test_what_reaches_back_further_than_any_snapshot_is_refused_with_what_keeps_them_from_it_and_what_to_do(
    tmp_path: Path,
) -> None:
    kept = two_days(tmp_path / "home")
    kept.land_and_judge(*late(100, received_s=day(3, 10)), tick(day(3, 20)))
    kept.forget()
    before = transitions_of(kept.home)
    [done] = amend_home(kept.home, AmendRequest())
    assert (done.retracted, done.added, done.corrected) == (0, 0, False)
    assert done.left is not None
    assert "the late message received at 2023-11-17T22:13:30.000Z reaches back to 2023-11-14T22:15:00.000Z" in done.left
    assert "run ./fleet amend until nothing is left, then ./fleet state snapshot" in done.left
    assert "can be amended" not in done.left
    assert "keep_messages" in done.left
    assert transitions_of(kept.home) == before
    assert amend_home(kept.home, AmendRequest()) == [], "it is named once: no later amend could do more"
    kept.snapshot()
    kept.land_and_judge(*late(day(3, 30), received_s=day(3, 40)), tick(day(3, 50)))
    [done] = amend_home(kept.home, AmendRequest())
    assert (done.added, done.corrected) == (1, True), "what was let go is done with, and does not keep others from being amended"


def test_without_a_snapshot_a_device_that_is_older_than_bronze_is_left_alone_and_a_new_one_is_amended(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    shutil.rmtree(kept.home.table(DEVICE_SNAPSHOTS.name))
    kept.land_and_judge(signal(day(3, 5), "n"), tick(day(3, 4000)))
    delayed = [signal(day(3, 2000), one, received_s=day(3, 4010), gateway="gw") for one in ("d", "n")]
    kept.land_and_judge(*delayed, tick(day(3, 4020)))
    kept.forget()
    old, new = amend_home(kept.home, AmendRequest())
    assert (old.device_id, old.retracted, old.corrected) == ("d", 0, False)
    assert old.left is not None
    assert old.left.startswith("messages from before "), "the reason alone, and what to do"
    assert "there is no snapshot" in old.left
    assert old.final
    assert (new.device_id, new.retracted, new.corrected) == ("n", 1, True)
    assert kept.agrees("n")


def test_a_snapshot_reaches_what_came_late_after_an_amend_was_done_with_what_came_before(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    kept.land_and_judge(*late(day(1, 50), received_s=day(3, 10)), signal(day(3, 15)), tick(day(3, 20)))
    unsaid = kept.snapshot()
    assert amend_home(kept.home, AmendRequest()) == [Amended("d", 0, 0, corrected=False, left=None)]
    kept.land_and_judge(tick(day(3, 30)))
    taken = kept.snapshot()
    assert (unsaid.amended_ms, taken.amended_ms) == (None, START + int(day(3, 20) * 1000) - 1)
    kept.land_and_judge(tick(day(3, 9000)))
    kept.land_and_judge(*late(day(3, 3000), received_s=day(3, 9010)), tick(day(3, 9020)))
    shutil.rmtree(kept.home.table(DEVICE_SNAPSHOTS.name))
    for one in (unsaid, taken):
        kept.write(one)
    kept.forget()
    chosen = choose_origins(kept.home, ["d"], kept.rows[-1].received_at_ms)
    [(begins, device_ids)] = chosen.begun.items()
    assert begins.snapshot is not None
    assert (begins.snapshot.newest_ms, device_ids) == (taken.newest_ms, ["d"])
    [done] = amend_home(kept.home, AmendRequest())
    assert (done.retracted, done.added) == (1, 1)
    assert kept.agrees()


def test_where_late_messages_are_no_longer_listed_no_older_snapshot_is_relied_on(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    kept.land_and_judge(*late(day(1, 3000), received_s=day(3, 10)), tick(day(3, 20)))
    kept.forget()
    promise(kept.home, "came_late", START + DAY_MS * 2)
    [done] = amend_home(kept.home, AmendRequest())
    assert done.left is not None
    assert "no longer all listed (keep_late)" in done.left


def test_in_a_fleet_for_which_little_comes_late_what_amend_was_done_with_moves_on(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    assert amend_home(kept.home, AmendRequest()) == []
    assert applicable_amend_progress(kept.home, kept.rows[-1].received_at_ms) == (kept.rows[-1].received_at_ms - 1, ())


def test_other_judgements_of_messages_go_and_a_snapshot_reaches_what_it_reached(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    said(kept.home, "clock", 0, 3)
    run_maintain(kept.home, FEW_LATE)
    kept.land_and_judge(*late(day(1, 3000), day(1, 6000), received_s=day(3, 10)), tick(day(3, 20)))
    kept.forget()
    [done] = amend_home(kept.home, AmendRequest())
    assert (done.retracted, done.added, done.corrected, done.left is None) == (1, 1, True, False)
    assert kept.agrees()


def test_a_snapshot_reaches_what_came_late_though_what_amend_was_done_with_before_is_no_longer_listed(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    shutil.rmtree(kept.home.table(DEVICE_SNAPSHOTS.name))
    kept.land_and_judge(*late(day(1, 50), received_s=day(3, 10)), signal(day(3, 15)), tick(day(3, 20)))
    amend_home(kept.home, AmendRequest())
    kept.snapshot()
    said(kept.home, "clock", 5)
    kept.land_and_judge(tick(day(5)))
    run_maintain(kept.home, FEW_LATE)
    assert judgements.unjudged(kept.home, "late") == []
    kept.land_and_judge(*late(day(4), received_s=day(5, 10)), tick(day(5, 20)))
    kept.forget()
    [done] = amend_home(kept.home, AmendRequest())
    assert done.corrected
    assert kept.agrees()


def test_a_device_whose_rows_are_all_kept_needs_no_list_of_what_came_late_before_them(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    shutil.rmtree(kept.home.table(DEVICE_SNAPSHOTS.name))
    said(kept.home, "late", 0)
    said(kept.home, "clock", 2)
    run_maintain(kept.home, FEW_LATE)
    kept.land_and_judge(signal(day(3, 5), "n"), tick(day(3, 4000)))
    kept.land_and_judge(signal(day(3, 2000), "n", received_s=day(3, 4010), gateway="gw"), tick(day(3, 4020)))
    kept.forget()
    [done] = amend_home(kept.home, AmendRequest())
    assert (done.device_id, done.retracted, done.corrected) == ("n", 1, True)
    assert kept.agrees("n")


def test_a_device_that_was_amended_from_rows_that_are_neither_listed_nor_kept_is_left_alone(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    shutil.rmtree(kept.home.table(DEVICE_SNAPSHOTS.name))
    kept.land_and_judge(signal(day(3, 5), "n"), tick(day(3, 4000)))
    kept.land_and_judge(signal(day(3, 2000), "n", received_s=day(3, 4010), gateway="gw"), tick(day(3, 4020)))
    kept.forget()
    promise(kept.home, "came_late", START + DAY_MS)
    before = {"kind": "add", "device_id": "n", "event_time_ms": START, "life_ms": START, "amendment_no": 1}
    tables.append(kept.home, JUDGEMENTS, tables.to_table(JUDGEMENTS, [before]), "other", 1)
    [done] = amend_home(kept.home, AmendRequest())
    assert (done.retracted, done.added, done.corrected, done.final) == (0, 0, False, True)


def test_a_snapshot_that_amend_had_read_beyond_says_nothing_of_what_it_was_done_with(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    assert applicable_amend_progress(kept.home, kept.rows[-1].received_at_ms) == (None, ())
    kept.land_and_judge(*late(day(1, 50), received_s=day(3, 10)), signal(day(3, 15)), tick(day(3, 20)))
    amend_home(kept.home, AmendRequest())
    newest_ms = kept.rows[-1].received_at_ms
    assert (applicable_amend_progress(kept.home, newest_ms - 1), applicable_amend_progress(kept.home, newest_ms)) == (
        (None, ()),
        (newest_ms - 1, ()),
    )
    assert tables.landed(kept.home, JUDGEMENTS, "amend") == newest_ms - 1
    tables.append(kept.home, JUDGEMENTS, tables.to_table(JUDGEMENTS, []), "amend", newest_ms)
    assert applicable_amend_progress(kept.home, newest_ms) == (None, ()), "it is not of this table"


def test_a_device_that_stays_apart_takes_no_snapshot_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = two_days(tmp_path / "home")
    shutil.rmtree(kept.home.table(DEVICE_SNAPSHOTS.name))
    kept.land_and_judge(*[signal(day(3, 5), one, received_s=day(3, 20), gateway="gw") for one in ("e", "f")], tick(day(3, 30)))
    kept.land_and_judge(*late(day(1, 50), received_s=day(3, 40)), signal(day(3, 45)), tick(day(3, 50)))
    assert {one.device_id: one.left is None for one in amend_home(kept.home, AmendRequest())} == {
        "d": True,
        "e": False,
        "f": False,
    }
    taken, newest_ms = kept.snapshot(), kept.rows[-1].received_at_ms
    assert (taken.amended_ms, taken.unmet) == (newest_ms - 1, ("e", "f"))
    assert snapshots(kept.home)[0].unmet == ("e", "f")
    kept.land_and_judge(*late(day(3, 100), received_s=day(3, 9000)), tick(day(3, 9010)))
    kept.forget()
    chosen = choose_origins(kept.home, ["d", "e"], kept.rows[-1].received_at_ms)
    assert [begins.snapshot is not None for begins, ids in chosen.begun.items() if "d" in ids] == [True]
    assert list(chosen.why) == ["e"]
    done = {one.device_id: one for one in amend_home(kept.home, AmendRequest())}
    assert (done["d"].added, done["d"].final) == (1, False)
    assert kept.agrees()
    monkeypatch.setattr("fleetpulse.reports.replay_origin._MOST_NAMED", 1)
    done_ms = tables.landed(kept.home, JUDGEMENTS, "amend")
    write_amend_progress(kept.home, AmendProgress(done_ms, newest_ms, ("e", "f")))
    assert applicable_amend_progress(kept.home, newest_ms) == (done_ms, ()), "too many to be named"


@pytest.mark.parametrize("gone", ["files", "log"])
def test_a_snapshot_that_maintenance_removes_when_it_was_chosen_ends_the_amend_in_a_sentence(tmp_path: Path, gone: str) -> None:
    kept = two_days(tmp_path / "home")
    kept.land_and_judge(*late(day(1, 3000), received_s=day(3, 10)), tick(day(3, 20)))
    kept.forget()
    [begins] = choose_origins(kept.home, ["d"], kept.rows[-1].received_at_ms).begun
    assert begins.snapshot is not None
    table = kept.home.table(DEVICE_SNAPSHOTS.name)
    if gone == "log":
        write_deltalake(str(table), DeltaTable(str(table)).to_pyarrow_table(), mode="overwrite")
        DeltaTable(str(table)).create_checkpoint()
        (table / "_delta_log" / f"{begins.snapshot.version:020d}.json").unlink()
    else:
        for path in table.rglob("*.parquet"):
            path.unlink()
    with refused("snapshot-removed", match=f"^snapshot {begins.snapshot.version} was removed .*; run the command again$"):
        begins.outcome(kept.home, ["d"])


def test_rows_that_maintenance_removes_when_it_was_chosen_where_to_begin_end_the_amend_in_a_sentence(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    kept.land_and_judge(*late(day(1, 3000), received_s=day(3, 10)), tick(day(3, 20)))
    kept.forget()
    for begins in (Begun(), Begun(replace(snapshots(kept.home)[0], bronze=1))):
        with refused("messages-removed"):
            begins.rows(kept.home, ["d"], None)
    [begins] = choose_origins(kept.home, ["d"], kept.rows[-1].received_at_ms).begun
    assert begins.rows(kept.home, ["d"], None), "it begins where all are there"


def test_memory_holds_what_came_late_for_some_devices_at_a_time(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    kept.forget()
    columns = {"kind": "late", "message_kind": "heartbeat", "event_time_ms": START, "received_at_ms": START + 4 * DAY_MS}
    rows = [{**columns, "device_id": f"many-{number % 2000}"} for number in range(40_000)]
    tables.append(kept.home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "other", 1)
    del rows

    def peak_bytes(devices: int) -> int:
        device_ids = [f"many-{number}" for number in range(devices)]
        tracemalloc.start()
        try:
            found = choose_origins(kept.home, device_ids, START + 5 * DAY_MS)
            assert len(found.why) == devices
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(1)  # what is loaded at first
    assert peak_bytes(2000) < 1.6 * peak_bytes(500)


def test_a_beginning_reaches_what_came_and_happened_after_it_and_what_was_done_with_before() -> None:
    beginning = ReplayOrigin(newest_ms=100, frontier_ms=90, amended_ms=50)
    assert beginning.beyond([]) is None
    assert beginning.beyond([(91, 101), (3, 50)]) is None
    assert beginning.beyond([(90, 101), (91, 101)]) == 90, "it happened before"
    assert beginning.beyond([(40, 51)]) == 40, "it was not done with"
    assert ReplayOrigin(100, 90).beyond([(3, 50)]) == 3


def test_no_correction_is_worked_out_of_what_happened_before_the_beginning() -> None:
    rows = [signal(10), signal(20), tick(40)]
    known = outcome(rows, DEPLOYMENT)
    came = [signal(15, kind="error", code="x", received_s=41, gateway="gw"), tick(60)]
    assert corrections(came, DEPLOYMENT, ["d"], known) == []
    assert len(corrections([*rows, *came], DEPLOYMENT, ["d"]) or []) == 1


def test_since_is_refused_before_what_is_kept_with_the_oldest_instant_that_can_be_named(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    kept.land_and_judge(*late(day(1, 3000), received_s=day(3, 10)), tick(day(3, 20)))
    assert [one.device_id for one in amend_home(kept.home, AmendRequest(since_ms=0, dry_run=True))] == ["d"], "all is kept"
    kept.forget()
    kept_ms = oldest_kept_ms(kept.home, "messages")
    assert kept_ms is not None
    before = tables.version(kept.home.table(JUDGEMENTS.name))
    for wanted in (AmendRequest(since_ms=kept_ms - 1), AmendRequest(("d",), since_ms=0), AmendRequest(since_ms=0, dry_run=True)):
        with refused("amend-not-retained", match=rf"kept from {format_instant(kept_ms)} on .*keep_messages.*; name .* or later"):
            amend_home(kept.home, wanted)
    assert tables.version(kept.home.table(JUDGEMENTS.name)) == before
    [done] = amend_home(kept.home, AmendRequest(since_ms=kept_ms))
    assert (done.retracted, done.added) == (1, 1)
    promise(kept.home, "came_late", kept_ms + 1)
    with refused("amend-not-retained", match=rf"kept from {format_instant(kept_ms + 1)} on .*keep_late"):
        amend_home(kept.home, AmendRequest(since_ms=kept_ms))
    assert [one.device_id for one in amend_home(kept.home, AmendRequest())] == ["d"], "without it, it goes on where it was"


def test_since_is_an_instant_of_the_past(tmp_path: Path) -> None:
    kept = two_days(tmp_path / "home")
    with refused("instant-not-past", Misuse):
        amend_by_command(kept.home.path, since="2999-01-01T00:00:00Z")
