"""Amend after retention removed the first rows: replay from a snapshot, or refusal of the device."""

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
from fleetpulse.io.home.retention_floor import oldest_kept_ms, raise_floor
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import snapshots
from fleetpulse.reports import judgements
from fleetpulse.reports.device_judgements import judgements_by_device
from fleetpulse.reports.history.replay_origin import OriginChoice, StartingPoint, applicable_amend_progress, choose_origins
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.amended import correction_rows, transitions_of
from tests.support.homes.maintained import KEEP, run_maintain
from tests.support.homes.retained import DAY_MS, DEPLOYMENT, day, late, two_days
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
FEW_LATE = replace(KEEP, late_ms=DAY_MS)


def append_unjudged(home: Home, kind: str, *days: int) -> None:
    """Append judgements that list messages of an unrelated device as not judged."""
    rows = [
        {"kind": kind, "device_id": "x", "received_at_ms": START + day_no * DAY_MS, "judged_at_ms": START + day_no * DAY_MS}
        for day_no in days
    ]
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), kind, days[0] + 1)


def test_amend_from_a_snapshot_equals_amend_from_the_whole_history(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    retained.land_and_judge(*late(day(1, 3000), day(1, 6000), received_s=day(3, 10)), tick(day(3, 20)))
    shutil.copytree(retained.home.path, tmp_path / "complete")
    retained.forget()
    [result] = amend_home(retained.home, AmendRequest())
    assert (result.retracted, result.added, result.corrected) == (1, 1, True)
    assert retained.agrees()
    assert transitions_of(retained.home)[-2:] == [(day(1, 10), "online", "signal"), (day(1, 9600), "offline", "silence")]
    complete = Home(tmp_path / "complete")
    assert amend_home(complete, AmendRequest()) == [result]
    assert Counter(judgements_by_device(complete, ["d"])["d"]) == Counter(judgements_by_device(retained.home, ["d"])["d"])
    [correction], [other_correction] = correction_rows(retained.home, day(3, 21)), correction_rows(complete, day(3, 21))
    assert correction.contents() == other_correction.contents()
    retained.land_and_judge(correction, tick(day(3, 60)))
    assert amend_home(retained.home, AmendRequest()) == [Amended("d", 0, 0, corrected=False, left=None)]
    assert amend_home(retained.home, AmendRequest()) == []
    assert retained.agrees()


def test_amend_prefers_a_qualifying_snapshot_even_if_bronze_is_complete(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    retained.land_and_judge(*late(day(1, 3000), received_s=day(3, 10)), tick(day(3, 20)))
    newest_ms = retained.rows[-1].received_at_ms
    assert choose_origins(retained.home, ["d"], newest_ms).by_origin == {StartingPoint(snapshots(retained.home)[0]): ["d"]}
    retained.land_and_judge(*late(50, received_s=day(3, 30)), tick(day(3, 40)))
    assert choose_origins(retained.home, ["d"], retained.rows[-1].received_at_ms) == OriginChoice({StartingPoint(): ["d"]}, {})


def test_interrupted_amend_resumes_after_the_finished_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retained = two_days(tmp_path / "home")
    for number, device in enumerate(("k", "l", "m")):
        retained.land_and_judge(
            signal(day(3, 100 + number), device), signal(day(3, 50), device, received_s=day(3, 200 + number), gateway="gw")
        )
    retained.land_and_judge(tick(day(3, 300)))
    monkeypatch.setattr(job, "_AT_ONCE", 1)
    amend_some, processed = job._amend_some, list[str]()

    def interrupt(home: Home, group: Any, through_ms: int, request: AmendRequest) -> list[Amended]:
        processed.extend(group.device_ids)
        if len(processed) == 3:
            raise FleetError("interrupted", code="interrupted-by-the-test")
        return [Amended(device_id, 0, 0, corrected=False, left=None) for device_id in group.device_ids]

    monkeypatch.setattr(job, "_amend_some", interrupt)
    with refused("interrupted-by-the-test"):
        amend_home(retained.home, AmendRequest())
    monkeypatch.setattr(job, "_amend_some", amend_some)
    assert (processed, [one.device_id for one in amend_home(retained.home, AmendRequest())]) == (["k", "l", "m"], ["m"])


def test_refusal_names_the_late_message_that_disqualifies_every_snapshot(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    retained.land_and_judge(*late(day(1, 8500), received_s=day(3, 10)), tick(day(3, 20)))
    retained.snapshot()
    retained.land_and_judge(
        *late(day(3, 12), received_s=day(3, 30)), *late(day(1, 20), received_s=day(3, 30.5)), tick(day(3, 40))
    )
    retained.forget()
    [why] = choose_origins(retained.home, ["d"], retained.rows[-1].received_at_ms).why.values()
    assert "at 2023-11-17T22:13:50.500Z reaches back to 2023-11-15T22:13:40.000Z" in why, (
        "neither snapshot qualifies for this message"
    )


def test_amend_from_a_snapshot_applies_a_corrected_registry_entry(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    entry = row(day(3, 10), "d/registry", op="add", effective_from_s=day(1, 200), **{"class": "slow"})
    retained.land_and_judge(entry, tick(day(3, 20)))
    retained.forget()
    [result] = amend_home(retained.home, AmendRequest())
    assert (result.retracted, result.added) == (1, 1)
    assert retained.agrees()
    assert transitions_of(retained.home)[-1] == (day(1, 7300), "offline", "silence")


def test_late_message_older_than_every_snapshot_is_refused_with_a_remedy(
    tmp_path: Path,
) -> None:
    retained = two_days(tmp_path / "home")
    retained.land_and_judge(*late(100, received_s=day(3, 10)), tick(day(3, 20)))
    retained.forget()
    before = transitions_of(retained.home)
    [result] = amend_home(retained.home, AmendRequest())
    assert (result.retracted, result.added, result.corrected) == (0, 0, False)
    assert result.left is not None
    assert "the late message received at 2023-11-17T22:13:30.000Z reaches back to 2023-11-14T22:15:00.000Z" in result.left
    assert "run ./fleet amend until nothing is left, then ./fleet state snapshot" in result.left
    assert "can be amended" not in result.left
    assert "keep_messages" in result.left
    assert transitions_of(retained.home) == before
    assert amend_home(retained.home, AmendRequest()) == [], "it is reported once, as no later amend could do more"
    retained.snapshot()
    retained.land_and_judge(*late(day(3, 30), received_s=day(3, 40)), tick(day(3, 50)))
    [result] = amend_home(retained.home, AmendRequest())
    assert (result.added, result.corrected) == (1, True), "a refused late message does not prevent later amendments"


def test_without_a_snapshot_only_devices_newer_than_bronze_are_amended(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    shutil.rmtree(retained.home.table(DEVICE_SNAPSHOTS.name))
    retained.land_and_judge(signal(day(3, 5), "n"), tick(day(3, 4000)))
    delayed = [signal(day(3, 2000), one, received_s=day(3, 4010), gateway="gw") for one in ("d", "n")]
    retained.land_and_judge(*delayed, tick(day(3, 4020)))
    retained.forget()
    old, new = amend_home(retained.home, AmendRequest())
    assert (old.device_id, old.retracted, old.corrected) == ("d", 0, False)
    assert old.left is not None
    assert old.left.startswith("messages received before "), "the error has only the reason and the remedy"
    assert "there is no snapshot" in old.left
    assert old.final
    assert (new.device_id, new.retracted, new.corrected) == ("n", 1, True)
    assert retained.agrees("n")


def test_snapshot_after_a_finished_amend_is_the_origin_for_later_late_messages(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    retained.land_and_judge(*late(day(1, 50), received_s=day(3, 10)), signal(day(3, 15)), tick(day(3, 20)))
    before_amend = retained.snapshot()
    assert amend_home(retained.home, AmendRequest()) == [Amended("d", 0, 0, corrected=False, left=None)]
    retained.land_and_judge(tick(day(3, 30)))
    after_amend = retained.snapshot()
    assert (before_amend.amended_ms, after_amend.amended_ms) == (None, START + int(day(3, 20) * 1000) - 1)
    retained.land_and_judge(tick(day(3, 9000)))
    retained.land_and_judge(*late(day(3, 3000), received_s=day(3, 9010)), tick(day(3, 9020)))
    shutil.rmtree(retained.home.table(DEVICE_SNAPSHOTS.name))
    for snapshot in (before_amend, after_amend):
        retained.write(snapshot)
    retained.forget()
    chosen = choose_origins(retained.home, ["d"], retained.rows[-1].received_at_ms)
    [(origin, device_ids)] = chosen.by_origin.items()
    assert origin.snapshot is not None
    assert (origin.snapshot.newest_ms, device_ids) == (after_amend.newest_ms, ["d"])
    [result] = amend_home(retained.home, AmendRequest())
    assert (result.retracted, result.added) == (1, 1)
    assert retained.agrees()


def test_older_snapshot_is_rejected_if_late_messages_are_no_longer_listed(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    retained.land_and_judge(*late(day(1, 3000), received_s=day(3, 10)), tick(day(3, 20)))
    retained.forget()
    raise_floor(retained.home, "came_late", START + DAY_MS * 2)
    [result] = amend_home(retained.home, AmendRequest())
    assert result.left is not None
    assert "no longer all listed (keep_late)" in result.left


def test_amend_progress_advances_without_late_messages(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    assert amend_home(retained.home, AmendRequest()) == []
    assert applicable_amend_progress(retained.home, retained.rows[-1].received_at_ms) == (
        retained.rows[-1].received_at_ms - 1,
        (),
    )


def test_removal_of_other_judgements_does_not_disqualify_a_snapshot(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    append_unjudged(retained.home, "clock", 0, 3)
    run_maintain(retained.home, FEW_LATE)
    retained.land_and_judge(*late(day(1, 3000), day(1, 6000), received_s=day(3, 10)), tick(day(3, 20)))
    retained.forget()
    [result] = amend_home(retained.home, AmendRequest())
    assert (result.retracted, result.added, result.corrected, result.left is None) == (1, 1, True, False)
    assert retained.agrees()


def test_snapshot_qualifies_if_only_amended_late_messages_are_no_longer_listed(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    shutil.rmtree(retained.home.table(DEVICE_SNAPSHOTS.name))
    retained.land_and_judge(*late(day(1, 50), received_s=day(3, 10)), signal(day(3, 15)), tick(day(3, 20)))
    amend_home(retained.home, AmendRequest())
    retained.snapshot()
    append_unjudged(retained.home, "clock", 5)
    retained.land_and_judge(tick(day(5)))
    run_maintain(retained.home, FEW_LATE)
    assert judgements.unjudged(retained.home, "late") == []
    retained.land_and_judge(*late(day(4), received_s=day(5, 10)), tick(day(5, 20)))
    retained.forget()
    [result] = amend_home(retained.home, AmendRequest())
    assert result.corrected
    assert retained.agrees()


def test_device_with_complete_rows_needs_no_list_of_earlier_late_messages(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    shutil.rmtree(retained.home.table(DEVICE_SNAPSHOTS.name))
    append_unjudged(retained.home, "late", 0)
    append_unjudged(retained.home, "clock", 2)
    run_maintain(retained.home, FEW_LATE)
    retained.land_and_judge(signal(day(3, 5), "n"), tick(day(3, 4000)))
    retained.land_and_judge(signal(day(3, 2000), "n", received_s=day(3, 4010), gateway="gw"), tick(day(3, 4020)))
    retained.forget()
    [result] = amend_home(retained.home, AmendRequest())
    assert (result.device_id, result.retracted, result.corrected) == ("n", 1, True)
    assert retained.agrees("n")


def test_device_amended_from_rows_neither_listed_nor_retained_is_refused(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    shutil.rmtree(retained.home.table(DEVICE_SNAPSHOTS.name))
    retained.land_and_judge(signal(day(3, 5), "n"), tick(day(3, 4000)))
    retained.land_and_judge(signal(day(3, 2000), "n", received_s=day(3, 4010), gateway="gw"), tick(day(3, 4020)))
    retained.forget()
    raise_floor(retained.home, "came_late", START + DAY_MS)
    before = {"kind": "add", "device_id": "n", "event_time_ms": START, "life_ms": START, "amendment_no": 1}
    tables.append(retained.home, JUDGEMENTS, tables.to_table(JUDGEMENTS, [before]), "other", 1)
    [result] = amend_home(retained.home, AmendRequest())
    assert (result.retracted, result.added, result.corrected, result.final) == (0, 0, False, True)


def test_amend_progress_applies_to_no_state_older_than_the_amend(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    assert applicable_amend_progress(retained.home, retained.rows[-1].received_at_ms) == (None, ())
    retained.land_and_judge(*late(day(1, 50), received_s=day(3, 10)), signal(day(3, 15)), tick(day(3, 20)))
    amend_home(retained.home, AmendRequest())
    newest_ms = retained.rows[-1].received_at_ms
    assert (applicable_amend_progress(retained.home, newest_ms - 1), applicable_amend_progress(retained.home, newest_ms)) == (
        (None, ()),
        (newest_ms - 1, ()),
    )
    assert tables.landed(retained.home, JUDGEMENTS, "amend") == newest_ms - 1
    tables.append(retained.home, JUDGEMENTS, tables.to_table(JUDGEMENTS, []), "amend", newest_ms)
    assert applicable_amend_progress(retained.home, newest_ms) == (None, ()), "the progress does not match this table"


def test_unfinished_device_disqualifies_no_snapshot_for_other_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retained = two_days(tmp_path / "home")
    shutil.rmtree(retained.home.table(DEVICE_SNAPSHOTS.name))
    retained.land_and_judge(
        *[signal(day(3, 5), one, received_s=day(3, 20), gateway="gw") for one in ("e", "f")], tick(day(3, 30))
    )
    retained.land_and_judge(*late(day(1, 50), received_s=day(3, 40)), signal(day(3, 45)), tick(day(3, 50)))
    assert {one.device_id: one.left is None for one in amend_home(retained.home, AmendRequest())} == {
        "d": True,
        "e": False,
        "f": False,
    }
    taken, newest_ms = retained.snapshot(), retained.rows[-1].received_at_ms
    assert (taken.amended_ms, taken.unmet) == (newest_ms - 1, ("e", "f"))
    assert snapshots(retained.home)[0].unmet == ("e", "f")
    retained.land_and_judge(*late(day(3, 100), received_s=day(3, 9000)), tick(day(3, 9010)))
    retained.forget()
    chosen = choose_origins(retained.home, ["d", "e"], retained.rows[-1].received_at_ms)
    assert [origin.snapshot is not None for origin, ids in chosen.by_origin.items() if "d" in ids] == [True]
    assert list(chosen.why) == ["e"]
    results = {one.device_id: one for one in amend_home(retained.home, AmendRequest())}
    assert (results["d"].added, results["d"].final) == (1, False)
    assert retained.agrees()
    monkeypatch.setattr("fleetpulse.reports.history.replay_origin._MOST_NAMED", 1)
    done_ms = tables.landed(retained.home, JUDGEMENTS, "amend")
    write_amend_progress(retained.home, AmendProgress(done_ms, newest_ms, ("e", "f")))
    assert applicable_amend_progress(retained.home, newest_ms) == (done_ms, ()), "there are too many devices to name"


@pytest.mark.parametrize("removed", ["files", "log"])
def test_removal_of_the_chosen_snapshot_is_reported_as_an_error(tmp_path: Path, removed: str) -> None:
    retained = two_days(tmp_path / "home")
    retained.land_and_judge(*late(day(1, 3000), received_s=day(3, 10)), tick(day(3, 20)))
    retained.forget()
    [origin] = choose_origins(retained.home, ["d"], retained.rows[-1].received_at_ms).by_origin
    assert origin.snapshot is not None
    table = retained.home.table(DEVICE_SNAPSHOTS.name)
    if removed == "log":
        write_deltalake(str(table), DeltaTable(str(table)).to_pyarrow_table(), mode="overwrite")
        DeltaTable(str(table)).create_checkpoint()
        (table / "_delta_log" / f"{origin.snapshot.version:020d}.json").unlink()
    else:
        for path in table.rglob("*.parquet"):
            path.unlink()
    with refused("snapshot-removed", match=f"^snapshot {origin.snapshot.version} was removed .*; run the command again$"):
        origin.outcome(retained.home, ["d"])


def test_removal_of_rows_after_the_chosen_origin_is_reported_as_an_error(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    retained.land_and_judge(*late(day(1, 3000), received_s=day(3, 10)), tick(day(3, 20)))
    retained.forget()
    for origin in (StartingPoint(), StartingPoint(replace(snapshots(retained.home)[0], bronze=1))):
        with refused("messages-removed"):
            origin.rows(retained.home, ["d"], None)
    [origin] = choose_origins(retained.home, ["d"], retained.rows[-1].received_at_ms).by_origin
    assert origin.rows(retained.home, ["d"], None), "bronze has all rows after a newly chosen origin"


def test_choose_origins_bounds_the_late_messages_in_memory(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    retained.forget()
    columns = {"kind": "late", "message_kind": "heartbeat", "event_time_ms": START, "received_at_ms": START + 4 * DAY_MS}
    rows = [{**columns, "device_id": f"many-{number % 2000}"} for number in range(40_000)]
    tables.append(retained.home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "other", 1)
    del rows

    def peak_bytes(devices: int) -> int:
        device_ids = [f"many-{number}" for number in range(devices)]
        tracemalloc.start()
        try:
            found = choose_origins(retained.home, device_ids, START + 5 * DAY_MS)
            assert len(found.why) == devices
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(1)  # loads modules and fills caches
    assert peak_bytes(2000) < 1.6 * peak_bytes(500)


def test_replay_origin_serves_later_messages_and_those_amended_before_it() -> None:
    origin = ReplayOrigin(newest_ms=100, frontier_ms=90, amended_ms=50)
    assert origin.beyond([]) is None
    assert origin.beyond([(91, 101), (3, 50)]) is None
    assert origin.beyond([(90, 101), (91, 101)]) == 90, "its event time is not after the frontier of the origin"
    assert origin.beyond([(40, 51)]) == 40, "amend had not processed it"
    assert ReplayOrigin(100, 90).beyond([(3, 50)]) == 3


def test_corrections_ignore_events_before_the_replay_origin() -> None:
    rows = [signal(10), signal(20), tick(40)]
    known = outcome(rows, DEPLOYMENT)
    later_rows = [signal(15, kind="error", code="x", received_s=41, gateway="gw"), tick(60)]
    assert corrections(later_rows, DEPLOYMENT, ["d"], known) == []
    assert len(corrections([*rows, *later_rows], DEPLOYMENT, ["d"]) or []) == 1


def test_since_before_the_retention_floor_is_refused_with_the_oldest_instant(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    retained.land_and_judge(*late(day(1, 3000), received_s=day(3, 10)), tick(day(3, 20)))
    assert [one.device_id for one in amend_home(retained.home, AmendRequest(since_ms=0, dry_run=True))] == ["d"], (
        "all messages are retained"
    )
    retained.forget()
    kept_ms = oldest_kept_ms(retained.home, "messages")
    assert kept_ms is not None
    before = tables.version(retained.home.table(JUDGEMENTS.name))
    for request in (AmendRequest(since_ms=kept_ms - 1), AmendRequest(("d",), since_ms=0), AmendRequest(since_ms=0, dry_run=True)):
        with refused("amend-not-retained", match=rf"kept from {format_instant(kept_ms)} on .*keep_messages.*; name .* or later"):
            amend_home(retained.home, request)
    assert tables.version(retained.home.table(JUDGEMENTS.name)) == before
    [result] = amend_home(retained.home, AmendRequest(since_ms=kept_ms))
    assert (result.retracted, result.added) == (1, 1)
    raise_floor(retained.home, "came_late", kept_ms + 1)
    with refused("amend-not-retained", match=rf"kept from {format_instant(kept_ms + 1)} on .*keep_late"):
        amend_home(retained.home, AmendRequest(since_ms=kept_ms))
    assert [one.device_id for one in amend_home(retained.home, AmendRequest())] == ["d"], (
        "without --since, amend resumes at its progress"
    )


def test_since_must_be_in_the_past(tmp_path: Path) -> None:
    retained = two_days(tmp_path / "home")
    with refused("instant-not-past", Misuse):
        amend_by_command(retained.home.path, since="2999-01-01T00:00:00Z")
