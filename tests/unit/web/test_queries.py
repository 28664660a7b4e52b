"""Parameters of requests: words, numbers, instants and cursors."""

import base64
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.errors import Misuse
from fleetpulse.web import queries
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
INT64 = st.integers(-(2**63), 2**63 - 1)
TYPES = ((int,), (str,), (int, type(None)))


@given(number=INT64, word=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), last=INT64 | st.none())
def test_a_cursor_has_its_values(number: int, word: str, last: int | None) -> None:
    assert queries.decoded_cursor(queries.encoded_cursor(number, word, last), *TYPES) == [number, word, last]


@given(st.one_of(st.text(), st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists)))
def test_any_other_text_is_refused_as_a_cursor(content: object) -> None:
    text = content if isinstance(content, str) else base64.urlsafe_b64encode(json.dumps(content).encode()).decode()
    with suppress(Misuse):
        values = queries.decoded_cursor(text, *TYPES)
        assert [type(value) for value in values[:2]] == [int, str]


@pytest.mark.parametrize("values", [[2**63, "a", None], [1, "\ud800", None], [1, "a\0", None], [True, "a", None], [1, "a", 1.5]])
def test_values_that_a_query_cannot_take_are_refused(values: list[object]) -> None:
    with refused("parameter-invalid", Misuse):
        queries.decoded_cursor(base64.urlsafe_b64encode(json.dumps(values).encode()).decode(), *TYPES)
    nested = "[" * 3_000
    with refused("parameter-invalid", Misuse):
        queries.decoded_cursor(base64.urlsafe_b64encode(nested.encode()).decode(), *TYPES)


@pytest.mark.parametrize("text", ["0", "1001", "x", "-1", "٣", "1.0", "9" * 40])
def test_a_limit_out_of_bounds_is_refused(text: str) -> None:
    with refused("parameter-invalid", Misuse):
        queries.limit_of({"limit": text}, 50)
    assert (queries.limit_of({}, 50), queries.limit_of({"limit": "7"}, 50)) == (50, 7)


def test_words_are_checked() -> None:
    assert queries.flag_of({"all": "true"}, "all")
    assert not queries.flag_of({}, "all")
    for name, value in (("all", "yes"), ("all", "x" * 201)):
        with refused("parameter-invalid", Misuse):
            queries.flag_of({name: value}, name)
    assert queries.choices_of({"mode": "a,,b"}, "mode", ("a", "b")) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("yesterday", "instant-invalid"),
        ("2026-01-31T12:00:00", "instant-invalid"),
        ("9" * 18, "parameter-invalid"),
        ("1969-12-31T00:00:00Z", "parameter-invalid"),
    ],
)
def test_an_instant_that_the_tables_cannot_store_is_refused(text: str, code: str) -> None:
    with refused(code):
        queries.instant_of({"at": text}, "at")
    assert queries.instant_of({"at": "1700000000000"}, "at") == 1_700_000_000_000
    assert queries.instant_of({}, "at") is None
