"""Rows for several late messages or copies: few for each call, and sums that lose no message."""

import random
from typing import Any

import pytest

from fleetpulse.columnar.fold.judgement_batches import judgements_to_batch, sum_repeats
from fleetpulse.core.judgements import NEWEST, SUMMED, Judgement, JudgementKind, message_judgement
from fleetpulse.core.rows import FROM_DEVICES, Kind, Row
from fleetpulse.core.times import MINUTE_MS
from fleetpulse.reports.operations.agreement import differences
from tests.support.histories.floods import FIRST_MS as NOW
from tests.support.histories.floods import UNTIL_MS, bag, flood


def summed(listed: list[Judgement]) -> list[dict[str, Any]]:
    return sum_repeats(judgements_to_batch(listed), UNTIL_MS).to_pylist()


def test_flood_of_one_call_makes_few_rows_however_many_messages_it_has() -> None:
    rows = summed(flood(random.Random(1), 5_000, MINUTE_MS))
    each = len(FROM_DEVICES) * 2  # with an event time, or without
    assert len(rows) <= len(SUMMED) * (NEWEST + each)
    assert sum(row["messages"] is None for row in rows) == len(SUMMED) * NEWEST
    assert all(row["boot"] is None is row["gateway"] and row["seq"] is None for row in rows if row["messages"] is not None)


@pytest.mark.parametrize("seed", range(20))
def test_sums_lose_no_message_and_no_instant(seed: int) -> None:
    chance = random.Random(seed)
    listed = flood(chance, chance.choice([3, 6, 40, 400]), devices="abc"[: chance.randrange(1, 4)])
    rows = summed(listed)
    for kind, device_id, message_kind in {(one.kind, one.device_id, one.message_kind) for one in listed}:
        its = [one for one in listed if (one.kind, one.device_id, one.message_kind) == (kind, device_id, message_kind)]
        sums = [row for row in rows if (row["kind"], row["device_id"], row["message_kind"]) == (kind, device_id, message_kind)]
        assert sum(row["messages"] or 1 for row in sums) == len(its)
        for name, until, least in (("event_time_ms", "event_time_until_ms", min), ("received_at_ms", "received_until_ms", min)):
            found = [row[name] for row in sums if row[name] is not None]
            assert least(found, default=0) == min((value for one in its if (value := getattr(one, name)) is not None), default=0)
            assert all(row[until] is None or row[until] >= row[name] for row in sums)
        greatest = [row["event_time_until_ms"] or row["event_time_ms"] or 0 for row in sums]
        assert max(greatest) == max(one.event_time_ms or 0 for one in its)
        assert max(row["late_by_ms"] or 0 for row in sums) == max(one.late_by_ms or 0 for one in its)
    assert {row["received_until_ms"] for row in rows} <= {None, UNTIL_MS}
    assert all("further" in row["reason"] for row in rows if row["messages"] is not None)


def test_the_newest_signal_keeps_its_row_behind_any_number_of_wills() -> None:
    def late(at_ms: int, kind: Kind) -> Judgement:
        return message_judgement(Row(at_ms, kind, "a", "s", NOW - at_ms), JudgementKind.LATE, "why", 1)

    signal = late(NOW + 20, Kind.HEARTBEAT)
    rows = summed([*(late(NOW + at, Kind.DEATH) for at in range(21, 60)), signal, late(NOW, Kind.ERROR)])
    assert [row["received_at_ms"] for row in rows if row["message_kind"] == "heartbeat"] == [NOW + 20]
    assert sum(row["messages"] or 1 for row in rows) == 41 and len(rows) == NEWEST + 1


def test_few_messages_and_other_judgements_stay_as_they_are() -> None:
    few = [message_judgement(Row(NOW + 1, Kind.HEARTBEAT, "a", "s", NOW), JudgementKind.LATE, "why", 1)] * NEWEST
    others = [Judgement(JudgementKind.IDENTITY_CONFLICT, "a", received_at_ms=NOW + at) for at in range(50)]
    batch = judgements_to_batch([*few, *others])
    assert sum_repeats(batch, UNTIL_MS).equals(batch)
    many = sum_repeats(judgements_to_batch([*few, *few, *others]), UNTIL_MS)
    assert many["kind"].to_pylist().count("identity_conflict") == len(others)


@pytest.mark.parametrize("seed", range(20))
def test_cuts_into_calls_do_not_change_what_a_comparison_finds(seed: int) -> None:
    chance = random.Random(seed)
    listed = flood(chance, 200, devices="ab")
    whole = bag(judgements_to_batch(listed).to_pylist())
    sides = [whole]
    for _ in range(2):
        cut = chance.randrange(len(listed))
        sides.append(bag([*summed(listed[:cut]), *summed(listed[cut:])]))
    assert all(differences(one, other) == [] for one in sides for other in sides)
    lost = listed.copy()
    del lost[chance.randrange(len(lost))]
    assert len(differences(sides[1], bag(judgements_to_batch(lost).to_pylist()))) == 1
    assert len(differences(sides[1], bag([*summed(lost[:100]), *summed(lost[100:])]))) == 1
