"""Shards of several bridges and sites: definition, stream and oracle emit the same judgements."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.judgements import compared
from fleetpulse.core.presence.shards import Scope
from fleetpulse.core.replay import Deployment, outcome, replay
from fleetpulse.core.rows import Kind, Row
from tests.support.floors import Floor
from tests.support.histories.histories import any_internal_row, any_policy, any_signal, choosing, row, stamped_by_bridge
from tests.support.histories.key_groups import in_batches
from tests.support.oracle.compare import by_the_core, by_the_oracle

pytestmark = pytest.mark.property
STEPS = 40
MULTI_SHARD = Floor(20)


def _is_gap_of_sites(one: Row) -> bool:
    return one.kind is Kind.GAP and bool(Scope.of_gap(one.contents()).sites)


@st.composite
def _histories(draw: st.DrawFn, kinds: Sequence[str] = ("gap", "add", "maintain")) -> list[Row]:
    """Return a history of two devices and their gateways, with a gap of some of their sites."""
    choose = choosing(draw)
    rows = [any_signal(choose, ["a", "b"], STEPS) for _ in range(draw(st.integers(4, 24)))]
    own = [any_internal_row(choose, ["a", "b"], STEPS, kinds) for _ in range(draw(st.integers(0, 3)))]
    since_s = draw(st.integers(1, 3 * STEPS))
    lasts_s = draw(st.integers(1, 5 * STEPS))
    scope: dict[str, Any] = draw(st.sampled_from([{"sites": ["north"]}, {"sites": ["south", "site"]}, {"except": ["north"]}]))
    own += [row(since_s + 0.123, "fleet/_/d/gap", op="open", from_s=since_s, **scope)]
    own += [row(since_s + lasts_s + 0.456, "fleet/_/d/gap", op="close", until_s=since_s + lasts_s)]
    rows += [row(-1, "fleet/_/_/policy", policy=any_policy(choose), effective_from_s=-500)]
    rows += {one.received_at_ms: one for one in own}.values()
    return stamped_by_bridge([*rows, row(STEPS * 10 + 300, "fleet/_/b/tick", op="flush")], 5)


@MULTI_SHARD.over_all_examples
@given(_histories(), st.lists(st.integers(0, 40), max_size=8), st.integers(1, 2))
def test_batch_cuts_do_not_change_the_judgements_of_devices_in_several_shards(
    rows: list[Row], cuts: list[int], groups: int
) -> None:
    deployment = Deployment(5_000, 30_000)
    assert in_batches(rows, cuts, deployment, groups) == compared(replay(rows, deployment))
    assert by_the_core(rows, 5) == by_the_oracle(rows, 5)
    MULTI_SHARD.met(any(map(_is_gap_of_sites, rows)) and len({one.site for one in rows if one.device_id == "a"}) > 1)


@given(_histories(["policy"]), st.sampled_from(["north", "south"]))
def test_verdicts_of_a_site_do_not_depend_on_rows_and_gaps_of_other_sites(rows: list[Row], site: str) -> None:
    """The judgements of a device that stays at one site are unaffected by rows and gaps of only other sites."""
    other = "north" if site == "south" else "south"
    renamed = [_with_site_in_id(one) for one in rows]
    of_site = [one for one in renamed if one.site not in (other, "site") or one.kind is Kind.GAP]
    isolated = [one for one in of_site if one.kind is not Kind.GAP or Scope.of_gap(one.contents()).concerns(site)]
    deployment = Deployment(5_000, 30_000)
    outcomes = [outcome(some, deployment) for some in (renamed, stamped_by_bridge(isolated, 5))]
    transitions, isolated_transitions = (
        [one for one in known.judgements if one.device_id.startswith(site) and one.kind == "transition"] for known in outcomes
    )
    assert compared(transitions) == compared(isolated_transitions)


def _with_site_in_id(one: Row) -> Row:
    """Return a row with the site as part of the device id, so that each device has one site."""
    if one.site not in ("north", "south"):
        return one
    gateway = None if one.gateway is None else f"{one.site}/{one.gateway}"
    return replace(one, device_id=f"{one.site}/{one.device_id}", gateway=gateway)
