"""Shards of sites: a coverage gap of a bridge holds back its own sites and no others."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from fleetpulse.core.judgements import compared
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.presence.shards import EVERY_SITE, MAX_NAMED_SITES, Scope, Shards, served_sites
from fleetpulse.core.replay import Deployment, outcome
from fleetpulse.core.rows import Row
from tests.support.histories.histories import START, changes, positioned, row, signal, tick
from tests.support.histories.key_groups import in_batches

pytestmark = pytest.mark.unit
HOUR = 3_600.0
DEPLOYMENT = Deployment(60_000)


def at_site(site: str, at_s: float, device: str, **more: Any) -> Row:
    return row(more.pop("received_s", at_s), f"fleet/{site}/{device}/heartbeat", ts_s=at_s, **more)


def gap(at_s: float, bridge: str = "north", **content: Any) -> Row:
    return row(at_s, f"fleet/_/{bridge}/gap", **content)


def judged(rows: Iterable[Row]) -> list[tuple[float, str, str, str]]:
    """Return the transitions of a history; check that they do not depend on batches."""
    ordered = sorted(rows, key=lambda one: one.received_at_ms)
    result = outcome(ordered, DEPLOYMENT)
    for cuts in ([], [1, 3], list(range(1, len(ordered)))):
        assert in_batches(ordered, cuts, DEPLOYMENT, 2) == compared(result.judgements)
    return changes(result.judgements)


NORTH_GAP = gap(2 * HOUR, op="open", from_s=2 * HOUR, after_s=HOUR, sites=["oslo", "turku"])


def test_a_long_gap_of_a_bridge_holds_back_only_its_own_sites() -> None:
    rows = [at_site("oslo", HOUR, "far"), at_site("rome", HOUR, "near"), NORTH_GAP]
    rows += [at_site("rome", 10 * HOUR, "new"), tick(62 * HOUR)]
    result = outcome(rows, DEPLOYMENT)
    assert {one.device_id: str(one.mode) for one in result.devices.values()} == {
        "far": "online",
        "near": "offline",
        "new": "offline",
    }
    assert result.shards is not None
    assert [(result.shards.of(site).frontier_ms or 0) - START for site in ("oslo", "turku", "rome", None)] == [
        7_140_000,
        7_140_000,
        223_140_000,
        223_140_000,
    ]
    offline = [at_s for at_s, _, mode, _ in judged(rows) if mode == "offline"]
    assert offline == [2 * HOUR, 11 * HOUR], "near and new, each an hour after its signal"


def test_messages_that_the_broker_kept_during_a_gap_are_not_late() -> None:
    rows = [at_site("oslo", 1.5 * HOUR, "far"), NORTH_GAP, gap(62 * HOUR, op="close", until_s=62 * HOUR)]
    rows += [at_site("oslo", hour * HOUR, "far", received_s=62 * HOUR + hour / 2) for hour in range(3, 62)]
    rows += [tick(62 * HOUR + 600)]
    assert judged(rows) == [(1.5 * HOUR, "provisioned", "online", "signal")]
    assert not [one for one in outcome(rows, DEPLOYMENT).judgements if one.late_by_ms]


def test_silence_continues_after_a_gap_where_it_stopped() -> None:
    rows = [at_site("oslo", 1.5 * HOUR, "far"), NORTH_GAP, gap(62 * HOUR, op="close", until_s=62 * HOUR), tick(70 * HOUR)]
    assert judged(rows)[1:] == [(62.5 * HOUR, "online", "offline", "silence")], (
        "half an hour of silence before the gap, and half an hour after it"
    )


def test_the_first_bridge_holds_back_all_sites_except_those_of_others() -> None:
    opened = gap(2 * HOUR, "bridge-1", op="open", from_s=2 * HOUR, after_s=HOUR, **{"except": ["oslo"]})
    rows = [at_site("oslo", HOUR, "far"), at_site("rome", HOUR, "near"), opened, tick(62 * HOUR)]
    result = outcome(rows, DEPLOYMENT)
    assert {one.device_id: str(one.mode) for one in result.devices.values()} == {"far": "offline", "near": "online"}


def test_a_device_keeps_its_silence_when_it_moves_to_a_site_that_is_held_back() -> None:
    rows = [at_site("rome", 2 * HOUR, "d"), NORTH_GAP, row(2.5 * HOUR, "fleet/oslo/d/registry", op="add")]
    rows += [at_site("rome", 61.5 * HOUR, "d"), gap(62 * HOUR, op="close", until_s=62 * HOUR)]
    second_gap = gap(62.2 * HOUR, op="open", from_s=62.2 * HOUR, after_s=62 * HOUR, sites=["oslo"])
    rows += [second_gap, gap(64 * HOUR, op="close", until_s=64 * HOUR), tick(70 * HOUR)]
    assert judged(rows)[-1] == (64.3 * HOUR, "online", "offline", "silence"), "0.7 h before the second gap, and 0.3 h after it"


def test_an_old_signal_from_a_held_back_site_does_not_revive_a_dead_device() -> None:
    will = row(5 * HOUR, "fleet/rome/d/death")
    late = at_site("oslo", 2.2 * HOUR, "d", received_s=62 * HOUR + 1, seq=1)
    rows = [at_site("rome", 2 * HOUR, "d"), at_site("rome", 4.9 * HOUR, "d"), NORTH_GAP, will]
    rows += [gap(62 * HOUR, op="close", until_s=62 * HOUR), late, tick(63 * HOUR)]
    assert [mode for _, _, mode, _ in judged(rows)][-1] == "online", (
        "it was received after the will, so its clock does not matter"
    )
    early = at_site("oslo", 1.99 * HOUR, "d", seq=1)
    rows = [at_site("rome", HOUR, "d"), early, at_site("rome", 4.9 * HOUR, "d"), NORTH_GAP, will]
    rows += [gap(62 * HOUR, op="close", until_s=62 * HOUR), tick(63 * HOUR)]
    assert [mode for _, _, mode, _ in judged(rows)][-1] == "offline", "it was received before the will"


def test_a_gateways_death_does_not_affect_a_new_device_of_another_shard() -> None:
    rows = [gap(10, op="open", from_s=5, sites=["north"]), gap(20, op="close", until_s=20)]
    rows += [row(100, "fleet/north/h/death", gateway="h"), row(120, "fleet/south/d/error", gateway="h"), tick(4_000)]
    assert judged(positioned(rows)) == [(120, "provisioned", "online", "signal"), (3_720, "online", "offline", "silence")]


def test_policies_kept_for_a_held_back_site_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetpulse.core.replay.MAX_AHEAD", 3)
    content = parse_policy({}).normalised()
    rows = [at_site("oslo", HOUR, "far"), NORTH_GAP]
    rows += [row((3 + number) * HOUR, "fleet/_/_/policy", policy=content) for number in range(5)]
    result = outcome([*rows, tick(62 * HOUR)], DEPLOYMENT)
    assert [one.message_kind for one in result.judgements if one.kind == "refused"] == ["policy"] * 2
    assert judged([*rows, tick(62 * HOUR)])[:1] == [(HOUR, "provisioned", "online", "signal")]


def test_overlapping_gaps_split_the_sites_and_too_large_a_scope_covers_all() -> None:
    shards = Shards.begin(START).open_gap(START + 5, START, "a", Scope(frozenset("xy"), is_others=False))
    shards = shards.open_gap(START + 6, START, "b", Scope(frozenset("yz"), is_others=False))
    assert (len(shards), {*map(frozenset, shards.sites)}) == (4, {frozenset("x"), frozenset("y"), frozenset("z")})
    deaf = {site: shards.of(site).coverage.deaf for site in "xyzw"}
    assert deaf == {"x": ("a",), "y": ("a", "b"), "z": ("b",), "w": ()}
    closed = shards.close_gap(START + 9, START + 9, "b")
    assert {site: closed.of(site).coverage.deaf for site in "xyzw"} == {"x": ("a",), "y": ("a",), "z": (), "w": ()}
    many = Scope(frozenset(map(str, range(MAX_NAMED_SITES - 2))), is_others=False)
    assert [one.coverage.deaf for one in shards.open_gap(START + 9, START, "c", many).listenings] == [
        ("c",),
        ("a", "c"),
        ("a", "b", "c"),
        ("b", "c"),
    ]


@pytest.mark.parametrize(
    ("content", "scope"),
    [
        ({}, EVERY_SITE),
        ({"sites": ["oslo"]}, Scope(frozenset({"oslo"}), is_others=False)),
        ({"except": ["oslo"]}, Scope(frozenset({"oslo"}))),
        ({"sites": []}, EVERY_SITE),
        ({"sites": "oslo"}, EVERY_SITE),
        ({"sites": ["oslo", 7]}, EVERY_SITE),
        ({"sites": ["x" * 200]}, EVERY_SITE),
        ({"except": [str(number) for number in range(MAX_NAMED_SITES + 1)]}, EVERY_SITE),
    ],
    ids=lambda one: json.dumps(one)[:40] if isinstance(one, dict) else "",
)
def test_a_gap_row_without_a_valid_list_of_sites_concerns_all_sites(content: dict[str, Any], scope: Scope) -> None:
    assert Scope.of_gap(content) == scope
    assert Scope.of_gap(scope.to_plain()) == scope


def test_the_first_bridge_excludes_sites_of_others_unless_it_reads_other_formats() -> None:
    assert served_sites(["oslo"], ["rome"], takes_foreign=True) == Scope(frozenset({"oslo"}), is_others=False)
    assert served_sites([], ["oslo"], takes_foreign=False) == Scope(frozenset({"oslo"}))
    assert served_sites([], ["oslo"], takes_foreign=True) == EVERY_SITE
    assert served_sites([], [], takes_foreign=False) == EVERY_SITE


def test_without_gaps_all_sites_share_one_frontier() -> None:
    assert outcome([signal(0), tick(100)], DEPLOYMENT).shards == Shards.begin(START).read(START + 100_000, 60_000)
