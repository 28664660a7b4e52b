"""Short run of fuzzing: every input is accounted for. The long run is ``./fleet test fuzz``."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.inputs import messages, mutated, packet_seeds, seeds
from tests.fuzz.laws import Checker, check_message, check_packets, decoders_of, received


@given(messages)
def test_every_published_message_becomes_a_row_or_a_rejection_deterministically(data: bytes) -> None:
    published = received(*data.split(b"\n", 1))  # pyright: ignore[reportArgumentType]
    assert check_message(published.topic, published.payload).total() == len(decoders_of(published.topic))


@given(st.binary(max_size=600), st.lists(st.integers(0, 600), max_size=4))
def test_cuts_of_received_bytes_change_neither_messages_nor_errors(data: bytes, cuts: list[int]) -> None:
    check_packets(data, cuts)


def test_mutated_messages_are_accounted_for_through_the_pipeline() -> None:
    random, checker = Random(4), Checker()
    for check, inputs in ((checker.message, seeds()), (checker.packets, packet_seeds())):
        for data in inputs:
            check(data)
        for _ in range(4_000):
            check(mutated(random.choice(inputs), random.choice(inputs), random))
    checker.land()
    assert checker.outcomes["row"] > 300
    assert checker.outcomes.keys() >= {"topic", "json", "field", "reserved", "packets: messages", "packets: error"}
