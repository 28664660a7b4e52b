"""Retained messages in a crowded store of the broker: the user whose messages are removed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from fleetpulse.io.mqtt.acl import SERVICE_USER
from fleetpulse.io.mqtt.embedded.broker_api import BrokerApi, StreamUse
from fleetpulse.io.mqtt.embedded.retained_cleanup import STREAM, Retained, RetainedCleaner, heaviest_user

pytestmark = pytest.mark.unit


def _stored(*users: tuple[str, int]) -> list[Retained]:
    return [Retained(number, f"s.{number}", user, size) for number, (user, size) in enumerate(users)]


def test_the_user_with_most_bytes_gives_way_but_never_fleetpulse_itself() -> None:
    store = StreamUse(127, 4, 200, 0)
    assert heaviest_user(_stored(("a", 10), ("b", 9), (SERVICE_USER, 99), ("b", 9)), store) == "b"
    assert heaviest_user(_stored((SERVICE_USER, 99)), store) is None
    assert heaviest_user([], store) is None


def test_the_user_with_most_messages_gives_way_if_they_take_the_greater_share() -> None:
    stored = _stored(("a", 100), ("b", 1), ("b", 1))
    assert heaviest_user(stored, StreamUse(102, 3, 1_000, 4)) == "b"
    assert heaviest_user(stored, StreamUse(102, 3, 110, 40)) == "a"


def test_users_with_less_than_a_hundredth_of_the_store_keep_their_messages() -> None:
    assert heaviest_user(_stored(("a", 9), ("b", 9), ("b", 9)), StreamUse(2_000, 150, 2_000, 250)) is None
    assert heaviest_user(_stored(("a", 9), ("b", 9), ("b", 9)), StreamUse(2_000, 150, 2_000, 200)) == "b"


@pytest.mark.parametrize(
    ("use", "crowded"),
    [((50, 9, 100, 10), True), ((51, 1, 100, 10), True), ((50, 5, 100, 10), False), ((99, 9), False), ((99, 9, -1, -1), False)],
)
def test_a_store_is_crowded_by_bytes_or_by_messages(use: tuple[int, ...], crowded: bool) -> None:
    assert StreamUse(*use).is_crowded is crowded


class _Store:
    """Store of a broker, by its requests."""

    def __init__(self, messages: int, most: int) -> None:
        self.found = [("$MQTT.rmsgs.x", number, {"Nmqtt-RSource": SERVICE_USER}) for number in range(messages)]
        self.most, self.searches, self.is_searched = most, 0, False

    def use_of(self, stream: str) -> StreamUse:
        assert stream == STREAM
        return StreamUse(0, len(self.found), 0, self.most)

    @contextmanager
    def headers(self, _: str) -> Iterator[Iterator[tuple[str, int, dict[str, str]]]]:
        self.searches += 1
        self.is_searched = True
        yield iter(list(self.found))
        self.is_searched = False

    def __call__(self, _: str, content: dict[str, Any]) -> None:
        assert not self.is_searched, "its answer could be a message of the search"
        self.found = [one for one in self.found if one[1] != content["seq"]]

    def tell(self, *_: object) -> None: ...


def test_a_store_that_fleetpulse_itself_fills_is_searched_again_only_when_it_grows() -> None:
    store, cleaner = _Store(700, 1_000), RetainedCleaner()
    api = cast("BrokerApi", store)
    assert [cleaner.clean(api) for _ in range(3)] == [0, 0, 0]
    assert store.searches == 1
    store.found += [("$MQTT.rmsgs.y", number, {"Nmqtt-RSource": "a"}) for number in range(700, 720)]
    assert [cleaner.clean(api) for _ in range(2)] == [20, 0]
    assert {headers["Nmqtt-RSource"] for _, _, headers in store.found} == {SERVICE_USER}
