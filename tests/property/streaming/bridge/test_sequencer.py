"""The laws of a live intake, whatever arrives, is lost, written or asked for, in any order; no network, file or clock."""

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
SEGMENTS = Floor(5)  # with rows of ours and messages


def _ours(row: SegmentRow) -> bool:
    return row.origin in (Origin.BRIDGE.value, Origin.COMMAND.value)


def _device(row: SegmentRow) -> str:
    return row.topic.split("/")[2] if row.origin == Origin.COMMAND.value and row.topic != TICK else EVERYONE


class Live(RuleBasedStateMachine):
    """A bridge's intake beside a broker that delivers again what was not acknowledged, and a disk that keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = NOW
        self.number = 0  # of the newest message, and of its token
        self.flying: dict[bytes, int] = {}  # canaries by payload: which one of this life each is
        self.sent = self.opened = 0  # canaries of this life, and how many were sent when a gap was last opened
        self.disk: list[SegmentRow] = []
        self.segments = 0
        self.promised_ms: int | None = None
        self.due: dict[AckToken, bytes | None] = {}  # to be acknowledged with the next segment, and the payload that it must have
        self.certain: Counter[bytes] = Counter()  # payloads that nobody delivers again
        self.begin(None)

    # ---- what the bridge does

    def begin(self, position: BridgePosition | None) -> None:
        """Begin a life; what was delivered and not acknowledged is no longer ours."""
        self.intake = BridgeSequencer("b", position, secret=b"s", holds_back=True)
        self.intake.promised_ms = self.promised_ms
        self.due, self.flying, self.sent, self.opened = {}, {}, 0, 0
        self.intake.go_live(self.now_ms)

    def deliver(self, topic: str, payload: bytes, *, retained: bool = False, acknowledged: bool = True) -> Arrived:
        self.number += 1
        token = (1, self.number) if acknowledged else None
        if token is not None:
            row = not retained and topic != TICK
            self.due[token] = payload if row else None
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
            self.intake.arrived_together(arrived, self.now_ms)
            return
        for one in arrived:
            self.intake.arrived(one, self.now_ms)

    @rule()
    def send_a_canary(self) -> None:
        self.sent += 1
        self.flying[self.intake.canary(self.now_ms)] = self.sent

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), again=st.booleans())
    def let_a_canary_return(self, data: st.DataObject, again: bool) -> None:
        payload = data.draw(st.sampled_from([*self.flying]))
        number, was_open = self.flying[payload], self.intake.gap_open
        for _ in range(1 + again):
            self.intake.arrived(self.deliver(TICK, payload), self.now_ms)
        del self.flying[payload]
        assert self.intake.gap_open == (was_open and number <= self.opened), "a gap is closed by a canary that was sent behind it"

    @rule()
    def miss_a_canary(self) -> None:
        self.intake.open_gap(self.now_ms, "canary")
        self.opened = self.sent

    @rule()
    def lose_the_connection(self) -> None:
        self.due.clear()
        self.flying.clear()
        self.intake.lost(self.now_ms)
        self.opened = self.sent

    @rule(given=st.lists(COMMANDS, min_size=1, max_size=4))
    def command(self, given: Sequence[tuple[str, dict[str, Any]]]) -> None:
        for topic, content in given:
            self.number += 1
            content = {**content, "n": self.number}
            self.intake.command(f"{self.number}.json", topic, content, self.now_ms)
            self.certain[json.dumps(content, separators=(",", ":")).encode()] += 1

    @rule()
    def write(self) -> None:
        """Write a segment, as the bridge does where rows or tokens wait."""
        rows = [*self.intake.buffer.rows()]
        tokens = self.intake.written()
        payloads = {row.payload for row in rows}
        assert Counter(tokens) == Counter([*self.due]), "each token is given back once, by the first write behind its message"
        assert all(payload is None or payload in payloads for payload in self.due.values()), "and its row is in that segment"
        self.due = {}
        self.disk += rows
        self.segments += bool(rows)
        SEGMENTS.met(any(map(_ours, rows)) and not all(map(_ours, rows)))

    @rule(back_ms=st.sampled_from([0, 1, 3_000]))
    def promise(self, back_ms: int) -> None:
        """Promise, as the bridge does behind each segment; the clock may be set back at any time, so also just then."""
        promised_ms = self.intake.promise(self.now_ms)
        assert (promised_ms is None) == bool(self.intake.buffer), "nothing is promised while rows wait"
        if promised_ms is not None:
            assert promised_ms >= max((row.received_at_ms for row in self.disk), default=0)
            self.promised_ms = promised_ms
        self.now_ms -= back_ms

    @precondition(lambda self: self.disk)
    @rule(in_order=st.booleans())
    def begin_anew(self, in_order: bool) -> None:
        """Stop in order, or be killed: then what was not written is gone, but for commands, which are taken again."""
        if in_order:
            self.intake.stopping()
            self.write()
        kept = Counter(row.payload for row in self.disk)
        self.certain &= kept
        gaps = [json.loads(row.payload)["op"] for row in self.disk if row.topic == GAP]
        canaries = [row.received_at_ms for row in self.disk if row.topic == TICK and row.payload == b'{"bridge":"b"}']
        last_canary_ms = canaries[-1] if canaries else None
        at = BridgePosition(
            self.segments, self.disk[-1].received_at_ms, last_canary_ms=last_canary_ms, gap_open=gaps[-1:] == ["open"]
        )
        self.begin(at)

    # ---- what always holds

    @invariant()
    def rows_are_in_order_and_ours_share_their_instant_with_nobody(self) -> None:
        rows = [*self.disk[-1:], *self.intake.buffer.rows()]
        for before, row in pairwise(rows):
            assert before.received_at_ms <= row.received_at_ms
            if before.received_at_ms == row.received_at_ms and (_ours(before) or _ours(row)):
                assert EVERYONE not in (_device(before), _device(row)), "only commands about devices share an instant"
        commanded = [row for row in rows if row.origin == Origin.COMMAND.value]
        instants = Counter((row.received_at_ms, _device(row)) for row in commanded)
        assert not [one for one, count in instants.items() if count > 1], "and each of them is about another device"

    @invariant()
    def no_row_is_received_at_or_before_what_was_promised(self) -> None:
        if self.promised_ms is not None:
            assert all(row.received_at_ms > self.promised_ms for row in self.intake.buffer.rows())

    @invariant()
    def gaps_are_opened_and_closed_in_turn(self) -> None:
        rows = [*self.disk, *self.intake.buffer.rows()]
        operations = [json.loads(row.payload)["op"] for row in rows if row.topic == GAP]
        assert operations == (["open", "close"] * len(operations))[: len(operations)]
        assert self.intake.gap_open == (operations[-1:] == ["open"])

    @invariant()
    def what_nobody_delivers_again_is_there_once(self) -> None:
        rows = Counter(row.payload for row in [*self.disk, *self.intake.buffer.rows()])
        assert all(rows[payload] == count for payload, count in self.certain.items())


@SEGMENTS.over_all_examples
def test_whatever_comes_in_whatever_order_stamps_tokens_gaps_and_promises_are_kept() -> None:
    chosen = settings(stateful_step_count=40)
    run_state_machine_as_test(Live, settings=chosen)
