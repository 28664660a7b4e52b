"""Bootstrap from a table of devices: it is equivalent to rows of the registry at the start of a run."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.columnar.snapshot.bootstrap import REGISTERED_SCHEMA, bootstrap_groups
from fleetpulse.core.judgements import compared
from fleetpulse.core.policy import Policies
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import Deployment, outcome, replay
from fleetpulse.core.rows import Kind, Row
from tests.support.histories.histories import START, any_policy, choosing, row, stamped_by_bridge, tick
from tests.support.histories.key_groups import in_batches
from tests.support.histories.strategies import DEPLOYMENTS, histories
from tests.support.refusals import refused

BEGIN_S, SEEDED_S = -400, -50  # span before the bootstrap; the other rows are received from -1 s on
BEFORE = st.integers(BEGIN_S // 5, SEEDED_S // 5 - 1).map(lambda n: n * 5)


@st.composite
def _registrations(draw: st.DrawFn) -> list[Row]:
    rows: list[Row] = []
    for device in sorted(draw(st.sets(st.sampled_from("abcdef"), max_size=6))):
        more: dict[str, Any] = {
            "class": draw(st.sampled_from(["quick", "", None])),
            "gateway": draw(st.sampled_from(["g", "", None])),
        }
        rows.append(row(draw(BEFORE), f"{device}/registry", op="add", **more))
    return rows


@st.composite
def _before(draw: st.DrawFn) -> list[Row]:
    """Return policies and gaps, each at a different instant."""
    rows = [row(BEGIN_S - 1, "fleet/_/_/policy", policy=any_policy(choosing(draw)), effective_from_s=-1000)]
    if draw(st.booleans()):
        rows.append(row(draw(BEFORE) + 1.001, "fleet/_/_/policy", policy=any_policy(choosing(draw))))
    if draw(st.booleans()):
        opened, span = draw(BEFORE), draw(st.sampled_from([5, 40, 400]))
        rows.append(row(opened + 2.001, "fleet/_/b/gap", op="open", from_s=opened))
        if opened + span < SEEDED_S - 3:
            rows.append(row(opened + span + 2.002, "fleet/_/b/gap", op="close", until_s=opened + span + 7))
    return rows


def _as_table(registrations: list[Row]) -> pa.Table:
    rows = [
        {
            "device_id": one.device_id,
            "site": one.site,
            "device_class": one.contents()["class"],
            "gateway": one.contents()["gateway"],
            "registered_at": (one.event_time_ms or 0) * 1000,
        }
        for one in registrations
    ]
    schema = pa.schema([field if field.name != "registered_at" else field.with_type(pa.int64()) for field in REGISTERED_SCHEMA])
    return pa.Table.from_pylist(rows, schema=schema).cast(REGISTERED_SCHEMA)


def _stored_groups(table: pa.Table, shards: Shards, policies: Policies, groups: int, deployment: Deployment) -> dict[int, bytes]:
    """Return the key groups as `GroupProcessor.handleInitialState` stores them."""
    stored: dict[int, bytes] = {}
    for seed in bootstrap_groups(table, shards, policies, groups).to_pylist():
        group = KeyGroup.from_bytes(seed["block"])
        group.arm(deployment)
        stored[seed["key_group"]] = group.to_bytes()
    return stored


@given(_registrations(), _before(), histories(), st.lists(st.integers(0, 60), max_size=6), DEPLOYMENTS, st.integers(1, 4))
def test_devices_of_a_bootstrap_are_judged_like_devices_of_registry_rows(
    registrations: list[Row], before: list[Row], rest: list[Row], cuts: list[int], deployment: Deployment, groups: int
) -> None:
    ordered = sorted([*registrations, *before, tick(SEEDED_S)], key=lambda one: one.received_at_ms)
    known = outcome(stamped_by_bridge(ordered), deployment)
    assert known.shards is not None
    frontier_ms = known.shards.frontier_ms
    assume(frontier_ms is not None)
    assert frontier_ms is not None
    registrations = [one for one in registrations if (one.event_time_ms or 0) <= frontier_ms]
    prior = stamped_by_bridge([one for one in ordered if one.kind is not Kind.REGISTRY or one in registrations])
    rows = stamped_by_bridge([*prior, *rest])
    initial = _stored_groups(_as_table(registrations), known.shards, known.policies, groups, deployment)
    judgements = in_batches(rows[len(prior) :], cuts, deployment, groups, initial)
    want = _after(compared(replay(rows, deployment)), frontier_ms) - compared(
        one for one in known.judgements if one.to_mode is None
    )
    for key in list(judgements):
        if key[1] in ("_", "b"):  # every key group emits the judgements of policies and gaps
            assert key in want
            judgements[key] = want[key]
    assert judgements == want


def _after(judgements: Counter[tuple[Any, ...]], frontier_ms: int) -> Counter[tuple[Any, ...]]:
    """Return judgements without transitions at or before the frontier."""
    return Counter({key: count for key, count in judgements.items() if key[0] != "transition" or key[2] > frontier_ms})


def _devices(**more: Any) -> pa.Table:
    columns = {"device_id": ["a"], "site": ["s"], "device_class": [None], "gateway": [None], "registered_at": _instant(START)}
    return pa.table({**columns, **more})


def _instant(ms: int) -> pa.Array:
    return pa.array([ms * 1000], pa.timestamp("us", tz="UTC"))


@pytest.mark.parametrize(
    ("table", "code", "fact"),
    [
        (_devices().drop_columns(["site"]), "list-column-missing", "site$"),
        (_devices(site=[None]), "list-value-missing", "site; 1 "),
        (_devices(device_id=["_"]), "device-id-reserved", '"_"'),
        (_devices(site=["\u00e9" * 65]), "list-text-too-long", "a site .* 128 bytes; .* 130;"),
        (_devices(device_id=["d" * 258]), "list-text-too-long", "a device_id .* 257 bytes; .* 258;"),
        (_devices(gateway=["\u00e9" * 386]), "list-text-too-long", "a gateway .* 385 characters; .* 386;"),
        (_devices(device_class=["c" * 1_000]), "list-text-too-long", "a device_class .* 1,000;"),
        (pa.concat_tables([_devices(), _devices()]), "list-device-twice", '"a" 2 times'),
        (_devices(registered_at=_instant(START + 1)), "list-registered-later", "; 1 are"),
        (_devices(registered_at=[START]), "list-instant-invalid", "int64"),
        (_devices().append_column("site", [["t"]]), "list-column-twice", '"site" 2 times'),
    ],
)
def test_an_invalid_table_of_devices_is_refused_with_the_reason(table: pa.Table, code: str, fact: str) -> None:
    with refused(code, match=fact):
        bootstrap_groups(table, Shards.judged_through(START, START, 60_000), Policies(), 2)


def test_a_bootstrap_without_a_frontier_is_refused() -> None:
    with refused("frontier-missing"):
        bootstrap_groups(_devices(), Shards.begin(START), Policies(), 2)


@given(st.integers(-200, 200), DEPLOYMENTS)
def test_a_given_frontier_is_equivalent_to_a_reached_one(after_s: int, deployment: Deployment) -> None:
    lateness_ms = deployment.allowed_lateness_ms
    given_shards = Shards.judged_through(START + after_s * 1000, START, lateness_ms)
    if after_s < 0:
        assert given_shards.read(START + lateness_ms - 1, lateness_ms).frontier_ms == START + after_s * 1000
    else:
        reached = Shards.begin(START).read(START + after_s * 1000 + lateness_ms, lateness_ms)
        assert given_shards == reached
