"""Hypothesis strategies: random histories of a fleet, and deployments."""

from collections.abc import Sequence

from hypothesis import strategies as st

from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from tests.support.histories.histories import (
    KINDS,
    KINDS_AND_ANSWERS,
    OWN,
    OWN_AND_REVIEWS,
    any_internal_row,
    any_policy,
    any_signal,
    choosing,
    row,
    stamped_by_bridge,
)

OWN_BUT_ARRIVALS = tuple(one for one in OWN if one not in ("gap", "update"))


DEPLOYMENTS = st.sampled_from([1, 5, 20, 60]).map(lambda s: Deployment(s * 1000, 30_000))


@st.composite
def _signals(draw: st.DrawFn, kinds: Sequence[str]) -> Row:
    return any_signal(choosing(draw), "abc", 60, kinds)


@st.composite
def _own_rows(draw: st.DrawFn, own: Sequence[str]) -> Row:
    return any_internal_row(choosing(draw), "abc", 60, own)


@st.composite
def histories(draw: st.DrawFn, *, reviews: bool = False) -> list[Row]:
    """Return rows in the order of ``received_at``.

    Args:
        draw: drawing function of Hypothesis.
        reviews: whether policies can have the velocity rule, a person confirms flags, and there are commands, answers and alarms.
    """
    own = draw(st.lists(_own_rows(OWN_AND_REVIEWS if reviews else OWN), max_size=8, unique_by=lambda one: one.received_at_ms))
    rows = [*draw(st.lists(_signals(KINDS_AND_ANSWERS if reviews else KINDS), min_size=1, max_size=40)), *own]
    if draw(st.booleans()):
        rows.append(row(-1, "fleet/_/_/policy", policy=any_policy(choosing(draw), reviews=reviews), effective_from_s=-500))
    return stamped_by_bridge(rows)
