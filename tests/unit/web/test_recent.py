"""Values that requests share: for an interval, or for a version of the facts."""

from collections.abc import Callable
from threading import Event, Thread

import pytest

from fleetpulse.web.recent import RecentValues, VersionedValues
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
LIMIT_S = 20.0


def test_a_slow_value_is_read_at_most_once_in_an_interval() -> None:
    now, read = [100.0], list[int]()

    def value() -> int:
        read.append(len(read))
        return read[-1]

    recent = RecentValues(lambda: now[0])
    assert [recent.get("a", 5, value), recent.get("a", 5, value)] == [0, 0]
    now[0] += 5
    assert [recent.get("a", 5, value), recent.get("b", 5, value)] == [1, 2]


def test_a_value_that_is_being_read_again_is_the_one_before_for_another_interval() -> None:
    now, begun, ended = [100.0], Event(), Event()
    recent = RecentValues(lambda: now[0])
    assert recent.get("a", 5, lambda: 0) == 0

    def slow() -> int:
        begun.set()
        assert ended.wait(LIMIT_S)
        return 1

    now[0] += 6
    reader = Thread(target=recent.get, args=("a", 5, slow))
    reader.start()
    assert begun.wait(LIMIT_S)
    assert recent.get("a", 5, lambda: 2) == 0
    now[0] += 4
    waiter = Thread(target=lambda: found.append(recent.get("a", 5, lambda: 3)))
    found: list[int] = []
    waiter.start()
    ended.set()
    reader.join(LIMIT_S)
    waiter.join(LIMIT_S)
    assert found == [1], "a value of twice the interval is not returned: the request waits"


def test_a_value_that_cannot_be_read_is_read_again() -> None:
    recent = RecentValues()
    with pytest.raises(ZeroDivisionError):
        recent.get("a", 5, lambda: 1 // 0)
    assert recent.get("a", 5, lambda: 7) == 7


def test_a_value_of_a_version_is_computed_once_and_dropped_with_it() -> None:
    values, computed = VersionedValues(2), list[str]()

    def get(tag: str, key: str) -> str:
        return values.get(tag, key, lambda: computed.append(key) or f"{key} of {tag}")

    assert [get("1", "a"), get("1", "b"), get("1", "a")] == ["a of 1", "b of 1", "a of 1"]
    assert computed == ["a", "b"]
    assert [get("2", "a"), get("1", "a"), get("1", "a")] == ["a of 2", "a of 1", "a of 1"]
    assert computed == ["a", "b", "a", "a"]
    assert [get("1", one) for one in "bcbc"] == ["b of 1", "c of 1"] * 2
    assert computed[4:] == ["b", "c", "b"], "a third value drops the others"


@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_values_are_computed_one_at_a_time_if_wanted(one_at_a_time: bool) -> None:
    values, begun, ended = VersionedValues(9, one_at_a_time=one_at_a_time), Event(), Event()
    order = list[str]()

    def slow() -> None:
        begun.set()
        ended.wait(LIMIT_S if not one_at_a_time else 0.2)
        order.append("slow")

    def quick() -> None:
        order.append("quick")
        ended.set()

    thread = Thread(target=values.get, args=("1", "a", slow), daemon=True)
    thread.start()
    assert begun.wait(LIMIT_S)
    values.get("1", "b", quick)
    thread.join(LIMIT_S)
    assert order == (["slow", "quick"] if one_at_a_time else ["quick", "slow"])


def test_requests_for_the_same_value_of_a_version_wait_for_one_computation() -> None:
    values, begun, ended = VersionedValues(9), Event(), Event()
    computed, found = list[int](), list[int]()

    def slow() -> int:
        begun.set()
        assert ended.wait(LIMIT_S)
        computed.append(len(computed))
        return computed[-1]

    threads = [Thread(target=lambda: found.append(values.get("1", "a", slow)), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(LIMIT_S)
    ended.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert (computed, found) == ([0], [0] * 4)


def test_a_value_of_a_version_that_cannot_be_computed_is_computed_again() -> None:
    values = VersionedValues(9)
    with pytest.raises(ZeroDivisionError):
        values.get("1", "a", lambda: 1 // 0)
    assert values.get("1", "a", lambda: 7) == 7


def test_a_value_that_is_requested_shortly_before_it_expires_is_renewed_without_a_request() -> None:
    now, read = [100.0], list[int]()

    def value() -> int:
        read.append(len(read))
        return read[-1]

    recent = RecentValues(lambda: now[0])
    assert recent.get("a", 5, value) == 0
    recent.renew()
    now[0] += 4
    assert recent.get("a", 5, value) == 0
    assert read == [0], "the request does not wait"
    recent.renew()
    recent.renew()
    assert read == [0, 1]
    now[0] += 4
    assert recent.get("a", 5, value) == 1


def test_a_value_that_cannot_be_renewed_stays_until_it_expires() -> None:
    now = [100.0]
    recent = RecentValues(lambda: now[0])
    assert recent.get("a", 5, lambda: 7) == 7
    now[0] += 4
    assert recent.get("a", 5, lambda: 1 // 0) == 7
    recent.renew()
    now[0] += 1
    with pytest.raises(ZeroDivisionError):
        recent.get("a", 5, lambda: 1 // 0)


@pytest.mark.parametrize("one_at_a_time", [None, False, True])
def test_a_request_does_not_wait_for_a_slow_one_for_ever(monkeypatch: pytest.MonkeyPatch, one_at_a_time: bool | None) -> None:
    monkeypatch.setattr("fleetpulse.web.recent.WAIT_S", 0.01)
    begun, ended, recent = Event(), Event(), RecentValues()
    versioned = VersionedValues(2, one_at_a_time=bool(one_at_a_time))

    def get(compute: Callable[[], object]) -> object:
        return recent.get("a", 5, compute) if one_at_a_time is None else versioned.get("v1", "a", compute)

    def slow() -> int:
        begun.set()
        assert ended.wait(LIMIT_S)
        return 1

    reader = Thread(target=get, args=(slow,))
    reader.start()
    assert begun.wait(LIMIT_S)
    with refused("value-being-read"):
        get(lambda: 2)
    ended.set()
    reader.join(LIMIT_S)
    assert get(lambda: 3) == 1
