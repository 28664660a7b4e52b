"""Bounds of the state of a key group: it is limited while devices exist, and empty once they are forgotten."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.columnar.jit.layout import MEMORY
from fleetpulse.columnar.state.codec import from_stored
from fleetpulse.core.messages.text import MAX_ID_BYTES, MAX_TEXT
from fleetpulse.core.policy import MAX_AHEAD, MAX_SEQUENCE
from fleetpulse.core.presence.coverage import MAX_DEAF
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from tests.support.histories.histories import row, tick
from tests.support.histories.key_groups import Stream
from tests.support.histories.strategies import DEPLOYMENTS, histories

GONE_S = 7e7  # all devices are forgotten by then: longer than the silence that any tested policy allows
EMPTY_BYTES = 2_200  # maximum size of a group without devices, besides its policies


def _check(group: KeyGroup) -> None:
    devices = group.devices
    assert len(devices.memory) <= len(devices) == len(devices.boots) == len(devices.ids)
    assert (devices.rows[:, MEMORY] < len(devices.memory)).all()
    assert all(len(one) <= MAX_SEQUENCE for one in devices.sequences.words)
    texts = [*devices.sites.words, *devices.classes.words, *devices.gateways.words, *devices.codes.words]
    assert max(map(len, texts), default=0) <= MAX_TEXT
    for coverage in (one.coverage for one in group.shards.listenings):
        assert len(coverage.deaf) <= MAX_DEAF and all(len(name.encode()) <= MAX_ID_BYTES for name in coverage.deaf)
        assert all(first[1] is not None and first[1] < following[0] for first, following in pairwise(coverage.gaps))
        assert bool(coverage.deaf) == any(closed is None for _, closed in coverage.gaps)
    assert group.policies.after(group.shards.least_frontier_ms) <= MAX_AHEAD
    assert len(group.waiting) == len(group.shards)


def _checked_groups(stream: Stream) -> list[KeyGroup]:
    groups = [KeyGroup.from_bytes(stored) for stored in stream.stored.values()]
    for group in groups:
        _check(group)
    return groups


@given(histories(reviews=True), st.lists(st.integers(0, 60), max_size=6), DEPLOYMENTS, st.integers(1, 3))
def test_a_key_group_is_bounded_and_becomes_empty_with_its_last_device(
    rows: Sequence[Row], cuts: list[int], deployment: Deployment, groups: int
) -> None:
    stream = Stream(deployment, groups, {})
    for start, end in pairwise(sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})):
        stream.batch(rows[start:end])
        _checked_groups(stream)
    closed_gaps = [row(500 + number / 10, f"fleet/_/{name}/gap", op="close", until_s=500) for number, name in enumerate("bc")]
    for batch in (closed_gaps, [tick(GONE_S)], [tick(2 * GONE_S)], []):
        stream.batch(batch)
    assert len(stream.stored) == groups
    for number, group in enumerate(_checked_groups(stream)):
        assert not len(group.devices) and not any(map(len, group.waiting)) and not stream.chunks[number]
        assert not any(one.coverage.deaf or len(one.coverage.gaps) > 1 for one in group.shards.listenings)
        _, known = from_stored(stream.stored[number])
        assert not any(known[name] for name in ("site", "device_class", "gateway"))
        policy_size = sum(len(str(one.policy.normalised())) for one in group.policies.dated)
        assert len(stream.stored[number]) <= EMPTY_BYTES + 2 * policy_size
