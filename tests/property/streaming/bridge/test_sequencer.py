"""Laws of the bridge sequencer for any order of messages, losses, writes and commands, without network, file or clock."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from fleetpulse.core.rows import EVERYONE, FLUSH, Origin
from fleetpulse.io.ingest.segments import BridgePosition, SegmentRow
from fleetpulse.io.mqtt.subscriber import AckToken, Arrived
from streaming.bridge.sequencer import BridgeSequencer
from tests.support.floors import Floor
from tests.support.sequencers import NOW

pytestmark = pytest.mark.property
GAP, TICK = "fleet/_/b/gap", "fleet/_/b/tick"
DEVICES = st.sampled_from("abc")
COMMANDS = st.one_of(
    st.tuples(DEVICES.map(lambda one: f"fleet/s/{one}/control"), st.just({"op": "release"})),
    st.tuples(DEVICES.map(lambda one: f"fleet/s/{one}/registry"), st.just({"op": "add"})),
    st.just(("fleet/_/_/policy", {"policy": {}})),
    st.just((TICK, {"op": FLUSH})),
)
SEGMENTS = Floor(5)  # segments with both messages and rows of the bridge or of commands


def _is_own_row(row: SegmentRow) -> bool:
    return row.origin in (Origin.BRIDGE.value, Origin.COMMAND.value)


def _device(row: SegmentRow) -> str:
    return row.topic.split("/")[2] if row.origin == Origin.COMMAND.value and row.topic != TICK else EVERYONE


class SequencerMachine(RuleBasedStateMachine):
    """Sequencer with a broker that redelivers unacknowledged messages, and a disk that keeps written rows."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = NOW
        self.number = 0  # number of the newest message and of its token
        self.canaries: dict[bytes, int] = {}  # numbers of canaries that have not returned, by payload
        self.sent = self.opened = 0  # number of sent canaries, now and when a gap was last opened
        self.disk: list[SegmentRow] = []
        self.segments = 0
        self.promised_ms: int | None = None
        self.due: dict[AckToken, bytes | None] = {}  # tokens to acknowledge with the next segment, and their payloads in it
        self.certain: Counter[bytes] = Counter()  # payloads that are not redelivered
        self.begin(None)

    # ---- actions of the bridge

    def begin(self, position: BridgePosition | None) -> None:
        """Start the sequencer; unacknowledged messages of the previous run are forgotten."""
        self.sequencer = BridgeSequencer("b", position, secret=b"s", holds_back=True)
        self.sequencer.promised_ms = self.promised_ms
        self.due, self.canaries, self.sent, self.opened = {}, {}, 0, 0
        self.sequencer.go_live(self.now_ms)

    def deliver(self, topic: str, payload: bytes, *, retained: bool = False, acknowledged: bool = True) -> Arrived:
        self.number += 1
        token = (1, self.number) if acknowledged else None
        if token is not None:
            has_row = not retained and topic != TICK
            self.due[token] = payload if has_row else None
        elif not retained:
            self.certain[payload] += 1
        return Arrived(topic, payload, retained, token)

    @rule(by_ms=st.sampled_from([0, 1, 2, 700, 5_000, 60_000, -1, -2, -3_000]))
    def let_time_pass(self, by_ms: int) -> None:
        self.now_ms += by_ms

    @rule(
        messages=st.lists(st.tuples(DEVICES, st.booleans(), st.sampled_from([False] * 5 + [True])), min_size=1, max_size=4),
        together=st.booleans(),
    )
    def arrive(self, messages: Sequence[tuple[str, bool, bool]], together: bool) -> None:
        arrived = [
            self.deliver(f"fleet/s/{one}/error", b'{"n":%d}' % (self.number + 1), retained=retained, acknowledged=acknowledged)
            for one, acknowledged, retained in messages
        ]
        if together:
            self.sequencer.arrived_together(arrived, self.now_ms)
            return
        for one in arrived:
            self.sequencer.arrived(one, self.now_ms)

    @rule()
    def send_a_canary(self) -> None:
        self.sent += 1
        self.canaries[self.sequencer.canary(self.now_ms)] = self.sent

    @precondition(lambda self: self.canaries)
    @rule(data=st.data(), again=st.booleans())
    def let_a_canary_return(self, data: st.DataObject, again: bool) -> None:
        payload = data.draw(st.sampled_from([*self.canaries]))
        number, was_open = self.canaries[payload], self.sequencer.gap_open
        for _ in range(1 + again):
            self.sequencer.arrived(self.deliver(TICK, payload), self.now_ms)
        del self.canaries[payload]
        assert self.sequencer.gap_open == (was_open and number <= self.opened), (
            "only a canary sent after a gap was opened closes it"
        )

    @rule()
    def miss_a_canary(self) -> None:
        self.sequencer.open_gap(self.now_ms, "canary")
        self.opened = self.sent

    @rule()
    def lose_the_connection(self) -> None:
        self.due.clear()
        self.canaries.clear()
        self.sequencer.lost(self.now_ms)
        self.opened = self.sent

    @rule(commands=st.lists(COMMANDS, min_size=1, max_size=4))
    def command(self, commands: Sequence[tuple[str, dict[str, Any]]]) -> None:
        for topic, content in commands:
            self.number += 1
            content = {**content, "n": self.number}
            self.sequencer.command(f"{self.number}.json", topic, content, self.now_ms)
            self.certain[json.dumps(content, separators=(",", ":")).encode()] += 1

    @rule()
    def write(self) -> None:
        """Write a segment, as the bridge does if rows or tokens are buffered."""
        rows = [*self.sequencer.buffer.rows()]
        tokens = self.sequencer.written()
        payloads = {row.payload for row in rows}
        assert Counter(tokens) == Counter([*self.due]), "the first write after a message must return its token, once"
        assert all(payload is None or payload in payloads for payload in self.due.values()), (
            "the segment must contain the row of each acknowledged message"
        )
        self.due = {}
        self.disk += rows
        self.segments += bool(rows)
        SEGMENTS.met(any(map(_is_own_row, rows)) and not all(map(_is_own_row, rows)))

    @rule(back_ms=st.sampled_from([0, 1, 3_000]))
    def promise(self, back_ms: int) -> None:
        """Promise an instant before all later rows, as after each segment; then the clock may be set back."""
        promised_ms = self.sequencer.promise(self.now_ms)
        assert (promised_ms is None) == bool(self.sequencer.buffer), "the sequencer must promise nothing while rows are buffered"
        if promised_ms is not None:
            assert promised_ms >= max((row.received_at_ms for row in self.disk), default=0)
            self.promised_ms = promised_ms
        self.now_ms -= back_ms

    @precondition(lambda self: self.disk)
    @rule(in_order=st.booleans())
    def restart(self, in_order: bool) -> None:
        """Stop in order or by a kill, which loses unwritten rows, and start again; commands are then read again."""
        if in_order:
            self.sequencer.stopping()
            self.write()
        kept = Counter(row.payload for row in self.disk)
        self.certain &= kept
        gaps = [json.loads(row.payload)["op"] for row in self.disk if row.topic == GAP]
        canaries = [row.received_at_ms for row in self.disk if row.topic == TICK and row.payload == b'{"bridge":"b"}']
        last_canary_ms = canaries[-1] if canaries else None
        position = BridgePosition(
            self.segments, self.disk[-1].received_at_ms, last_canary_ms=last_canary_ms, gap_open=gaps[-1:] == ["open"]
        )
        self.begin(position)

    # ---- invariants

    @invariant()
    def rows_are_in_order_and_own_rows_share_no_instant(self) -> None:
        rows = [*self.disk[-1:], *self.sequencer.buffer.rows()]
        for before, row in pairwise(rows):
            assert before.received_at_ms <= row.received_at_ms
            if before.received_at_ms == row.received_at_ms and (_is_own_row(before) or _is_own_row(row)):
                assert EVERYONE not in (_device(before), _device(row)), "only commands for devices can share an instant"
        commanded = [row for row in rows if row.origin == Origin.COMMAND.value]
        instants = Counter((row.received_at_ms, _device(row)) for row in commanded)
        assert not [one for one, count in instants.items() if count > 1], "commands of one instant must be for different devices"

    @invariant()
    def no_row_is_received_at_or_before_the_promised_instant(self) -> None:
        if self.promised_ms is not None:
            assert all(row.received_at_ms > self.promised_ms for row in self.sequencer.buffer.rows())

    @invariant()
    def gaps_are_opened_and_closed_alternately(self) -> None:
        rows = [*self.disk, *self.sequencer.buffer.rows()]
        operations = [json.loads(row.payload)["op"] for row in rows if row.topic == GAP]
        assert operations == (["open", "close"] * len(operations))[: len(operations)]
        assert self.sequencer.gap_open == (operations[-1:] == ["open"])

    @invariant()
    def each_message_that_is_not_redelivered_has_one_row(self) -> None:
        rows = Counter(row.payload for row in [*self.disk, *self.sequencer.buffer.rows()])
        assert all(rows[payload] == count for payload, count in self.certain.items())


@SEGMENTS.over_all_examples
def test_laws_of_the_sequencer_hold_for_any_order_of_events() -> None:
    chosen = settings(stateful_step_count=40)
    run_state_machine_as_test(SequencerMachine, settings=chosen)
