"""Fuzzing in short: whatever comes, it is accounted for. The long form is ``./fleet test fuzz``."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.inputs import messages, mutated, packet_seeds, seeds
from tests.fuzz.laws import Accounts, check_message, check_packets, received


@given(messages)
def test_whatever_is_published_becomes_a_row_or_a_rejection_and_the_same_each_time(data: bytes) -> None:
    published = received(*data.split(b"\n", 1))  # pyright: ignore[reportArgumentType]
    assert check_message(published.topic, published.payload).total() == 2


@given(st.binary(max_size=600), st.lists(st.integers(0, 600), max_size=4))
def test_whatever_comes_on_the_line_is_messages_or_an_error_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    check_packets(data, cuts)


def test_mutations_of_what_devices_say_are_accounted_for_along_the_whole_way() -> None:
    random, accounts = Random(4), Accounts()
    for way, begin in ((accounts.message, seeds()), (accounts.packets, packet_seeds())):
        for data in begin:
            way(data)
        for _ in range(4_000):
            way(mutated(random.choice(begin), random.choice(begin), random))
    accounts.land()
    assert accounts.became["row"] > 300
    assert accounts.became.keys() >= {"topic", "json", "field", "reserved", "packets: messages", "packets: error"}
