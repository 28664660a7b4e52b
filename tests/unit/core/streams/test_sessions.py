"""Connection sessions: which messages begin and end one, and when it was silent for too long."""

from typing import Any

import pytest

from fleetpulse.core.rows import Row
from fleetpulse.core.streams.sessions import SETTLED_MS, sessions
from tests.support.histories.histories import START, row, signal, stamped_by_bridge, tick

pytestmark = pytest.mark.unit
SILENCE_S = 100.0


def ends(*rows: Row) -> list[tuple[float, str, float | None, str | None, int]]:
    """Return start, its message, end, its reason and the number of signals of each row, seconds after START."""
    found = sessions(stamped_by_bridge(rows), round(SILENCE_S * 1000))
    return [
        (
            (one.started_at_ms - START) / 1000,
            str(one.started_by),
            None if one.ended_at_ms is None else (one.ended_at_ms - START) / 1000,
            one.ended_by and str(one.ended_by),
            one.messages,
        )
        for one in found
    ]


def birth(at_s: float, session: str | None = None, **more: Any) -> Row:
    return signal(at_s, kind="birth", **({} if session is None else {"session": session}), **more)


def death(at_s: float, **fields: Any) -> Row:
    return row(at_s, "fleet/site/d/death", **fields)


def test_a_will_ends_the_session_that_a_birth_began() -> None:
    assert ends(birth(0, "1"), signal(5), death(9, session="1")) == [
        (0, "birth", None, None, 1),
        (0, "birth", 9, "will", 2),
    ]


@pytest.mark.parametrize("code", ["disconnect", "logout"])
def test_a_death_with_a_code_of_a_clean_end_is_a_disconnect(code: str) -> None:
    assert ends(birth(0, "1"), death(9, code=code))[-1] == (0, "birth", 9, "disconnect", 1)


def test_a_will_of_another_session_is_ignored() -> None:
    assert ends(birth(0, "1"), birth(50, "2"), death(60, session="1"), signal(61)) == [
        (0, "birth", None, None, 1),
        (0, "birth", 50, "birth", 1),
        (50, "birth", None, None, 1),
    ]


def test_a_will_without_session_is_compared_by_boot() -> None:
    assert ends(birth(0, "1", boot="a"), death(5, boot="b"))[-1] == (0, "birth", None, None, 1)
    assert ends(birth(0, "1", boot="a"), death(5, boot="a"))[-1] == (0, "birth", 5, "will", 1)


def test_another_signal_begins_a_session_if_none_is_open() -> None:
    assert ends(signal(3), signal(4), death(5), signal(6)) == [
        (3, "signal", None, None, 1),
        (3, "signal", 5, "will", 2),
        (6, "signal", None, None, 1),
    ]


def test_a_copy_of_a_birth_begins_no_session() -> None:
    assert len(ends(birth(0, "1"), birth(0.5, "1"))) == 1
    assert len(ends(birth(0, boot="a", seq=7), birth(0.5, boot="a", seq=7))) == 1
    assert len(ends(birth(0), birth(0))) == 1  # the same timestamp
    assert len(ends(birth(0), birth(1))) == 3


def test_an_older_birth_that_is_delivered_again_begins_no_session() -> None:
    assert ends(birth(0, "1", boot="a", seq=1), birth(5, "2", boot="a", seq=9), birth(6, "1", boot="a", seq=1))[-1] == (
        5,
        "birth",
        None,
        None,
        1,
    )


def test_a_session_takes_the_first_names_that_its_signals_give() -> None:
    found = [
        *sessions(
            [signal(0), signal(1, session="1", boot="a", firmware="1.0"), signal(2, session="2"), death(3, session="1")], 9_999
        )
    ]
    assert (found[-1].session, found[-1].boot, found[-1].firmware, found[-1].ended_by) == ("1", "a", "1.0", "will")


def test_silence_of_exactly_the_limit_continues_a_session() -> None:
    assert len(ends(signal(0), signal(SILENCE_S))) == 1
    assert ends(signal(0), signal(SILENCE_S + 0.001)) == [
        (0, "signal", None, None, 1),
        (0, "signal", 0, "silence", 1),
        (SILENCE_S + 0.001, "signal", None, None, 1),
    ]


def test_the_end_by_silence_is_written_once_gap_rows_of_other_bridges_have_arrived() -> None:
    settled_s = SILENCE_S + SETTLED_MS / 1000
    assert len(ends(signal(0), tick(settled_s))) == 1
    assert ends(signal(0), tick(settled_s + 0.001))[-1] == (0, "signal", 0, "silence", 1)


def test_a_coverage_gap_does_not_count_as_silence() -> None:
    gap = [row(90, "fleet/_/b/gap", op="open", from_s=10), row(91, "fleet/_/b/gap", op="close", until_s=91)]
    assert len(ends(signal(0), *gap, signal(181))) == 1
    assert len(ends(signal(0), *gap, signal(181.001))) == 3


def test_a_gap_of_another_site_counts_as_silence() -> None:
    gap = [row(90, "fleet/_/b/gap", op="open", from_s=10, sites=["far"]), row(91, "fleet/_/b/gap", op="close", until_s=91)]
    assert len(ends(signal(0), *gap, signal(181))) == 3


def test_event_times_have_no_effect() -> None:
    assert ends(signal(-9_999, received_s=0), signal(9_999, received_s=1))[-1] == (0, "signal", None, None, 1)
