"""Deaths and returns of gateways: the definition, the oracle and landing find the same ones."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.presence.gateways import Gateway, Gateways
from fleetpulse.core.rows import SET_WHEN_READ, Row
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.tables import tables
from streaming.landing.gateways import Arrived, with_events
from tests.support.histories.histories import positioned, row
from tests.support.oracle.compare import as_message
from tests.support.oracle.oracle import gateway_events

LATENESS_S = 20
FIELDS = [name for name in Row.__dataclass_fields__ if name not in {*SET_WHEN_READ, "gateway_event"}]
CLOCKS = ({"ts_s": -12}, {"ts_s": -12}, {"ts_s": 0}, {"ts_s": -25}, {"ts_s": 60}, {"ts": "noon"}, {})
MESSAGES_OF_G = st.tuples(
    st.sampled_from(["birth", "birth", "heartbeat", "death"]),
    st.sampled_from(CLOCKS),
    st.sampled_from(["g", "g", "g", None, "h"]),
    st.sampled_from(["p", "p", "p", "p", "q", None]),
    st.sampled_from(["s", "s", "t", "t", None]),
    st.sampled_from([1, 2, 3, 4, 5, 250, None]),
    st.sampled_from(["north", "north", "north", "north", "south"]),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Row]:
    """Return messages of a gateway, then a will of each session; the will of the newest session is a death."""
    rows: list[Row] = []
    for number, drawn in enumerate(draw(st.lists(MESSAGES_OF_G, min_size=2, max_size=8))):
        kind, clock, gateway, boot, session, seq, site = drawn
        payload = {name: 5 * number + value if name == "ts_s" else value for name, value in clock.items()}
        payload |= {"gateway": gateway, "boot": boot, "session": session, "seq": seq}
        rows.append(
            row(5 * number, f"fleet/{site}/g/{kind}", **{name: each for name, each in payload.items() if each is not None})
        )
    rows += [row(100, "g/death", gateway="g", session=session) for session in "st"]
    return positioned(rows, LATENESS_S)


@given(histories())
def test_the_definition_and_the_oracle_find_the_same_events_of_gateways(rows: list[Row]) -> None:
    found = [(one.received_at_ms, one.position, f"gateway_{one.gateway_event}") for one in rows if one.gateway_event]
    expected = gateway_events([as_message(one) for one in rows], LATENESS_S * 1000)
    assert found == [(*one.arrival, one.kind) for one in expected]


def _landed(rows: Sequence[Row], gateways: Gateways) -> tuple[list[str | None], list[dict[str, Any]]]:
    columns = {name: [getattr(one, name) for one in rows] for name in FIELDS}
    [marked], records = with_events([Arrived(np.arange(len(rows)), tables.from_columns(MESSAGES, columns, len(rows)))], gateways)
    return marked["gateway_event"].to_pylist(), records


@given(histories(), st.sets(st.integers(1, 8)))
def test_landing_finds_the_same_events_of_gateways_with_any_cuts_and_restarts(rows: list[Row], cuts: set[int]) -> None:
    found, kept = list[str | None](), dict[str, Gateway]()
    for start, end in pairwise([0, *sorted(one for one in cuts if one < len(rows)), len(rows)]):
        gateways = Gateways(LATENESS_S * 1000)
        gateways.restore(kept.values())
        events, records = _landed(rows[start:end], gateways)
        found += events
        names = Gateway.__dataclass_fields__
        kept |= {record["device_id"]: Gateway(**{name: record[name] for name in names}) for record in records}
    assert found == [one.gateway_event for one in rows]
