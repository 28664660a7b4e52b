"""Token buckets: messages counted together leave the same tokens as messages counted one by one."""

from hypothesis import given
from hypothesis import strategies as st

from streaming.bridge.token_buckets import BURST_S, TokenBuckets

NOW = 1_700_000_000_000
SENDERS = st.lists(st.integers(0, 12), min_size=24, max_size=60)  # enough to be counted on columns
STEPS_MS = st.integers(-5_000, 120_000)
OUTAGES = st.none() | st.integers(0, 600_000)


def _tokens(buckets: TokenBuckets) -> list[list[float]]:
    columns = (buckets._rows, buckets._bytes, buckets._at_ms)  # pyright: ignore[reportPrivateUsage]
    return [column[: len(buckets.slots)].tolist() for column in columns]


@given(
    st.integers(0, 3),
    st.integers(0, 40),
    st.lists(st.tuples(SENDERS, STEPS_MS, OUTAGES), min_size=1, max_size=6),
    st.lists(st.integers(0, 300), min_size=1, max_size=7),
)
def test_messages_counted_together_equal_messages_counted_one_by_one(
    rows_per_s: int, bytes_per_s: int, batches: list[tuple[list[int], int, int | None]], sizes: list[int]
) -> None:
    together, alone = TokenBuckets(rows_per_s, bytes_per_s), TokenBuckets(rows_per_s, bytes_per_s)
    now_ms, outage = NOW, (0, 0)
    for senders, step_ms, away_ms in batches:
        now_ms += step_ms
        outage = outage if away_ms is None else (now_ms, away_ms)
        slots = [together.slot(f"d{sender}") for sender in senders]
        assert slots == [alone.slot(f"d{sender}") for sender in senders]
        lengths = [sizes[place % len(sizes)] for place in range(len(slots))]
        one_by_one = [
            place for place, one in enumerate(zip(slots, lengths, strict=True)) if alone.take(one[:1], one[1:], now_ms, outage)
        ]
        assert together.take(slots, lengths, now_ms, outage) == one_by_one
        assert _tokens(together) == _tokens(alone)


@given(st.lists(st.integers(0, 3_000), min_size=1, max_size=400), st.integers(1, 40))
def test_slots_keep_their_tokens_when_the_columns_grow_and_others_are_forgotten(senders: list[int], kept: int) -> None:
    buckets = TokenBuckets(1, 0)
    slots = [buckets.slot(f"d{sender}") for sender in senders]
    buckets.take(slots, [0] * len(slots), NOW, (0, 0))
    known = {sender: senders.count(sender) for sender in dict.fromkeys(senders)}
    for number in range(3_001, 6_000):
        buckets.slot(f"d{number}")
    remaining = [f"d{sender}" for sender in [*known][-kept:]]
    buckets.keep(remaining)
    assert [*buckets.slots.items()] == [(sender, slot) for slot, sender in enumerate(remaining)]
    tokens = _tokens(buckets)[0]
    assert tokens == [float(max(0, BURST_S - known[int(sender[1:])])) for sender in remaining]


def test_a_batch_of_many_senders_is_counted_in_the_order_of_its_messages() -> None:
    buckets = TokenBuckets(1, 0)
    slots = [buckets.slot(f"d{number % 3}") for number in range(3 * BURST_S + 5)]
    assert buckets.take(slots, [0] * len(slots), NOW, (0, 0)) == [*range(3 * BURST_S, 3 * BURST_S + 5)]
    assert _tokens(buckets)[0] == [0.0] * 3
