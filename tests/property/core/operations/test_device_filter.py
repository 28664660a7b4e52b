"""Filters of devices: any text is parsed or refused with a code."""

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.errors import FleetError
from fleetpulse.core.operations.device_filter import FILTER_COLUMNS, parse_device_filter
from tests.support.refusals import refused

_SIGNS = ("(", ")", ",", "=", "!=", "<>", "<", "<=", ">", ">=", ";", "--", "`", "\\", "7", "-1", "'a%'", "''")
_WORDS = ("AND", "OR", "NOT", "IN", "LIKE", "BETWEEN", "IS", "NULL", "TRUE", "FALSE", "TIMESTAMP", "site", "seq", "last_seen")
_EDGES = ("'2026-01-31T12:00:00Z'", "'0001-01-01T00:00:00+23:59'", "'9999-12-31T23:59:59-23:59'")
_ANY = st.text(st.characters(codec=None, exclude_categories=()), max_size=60)
_ALMOST = st.lists(st.sampled_from([*_SIGNS, *_WORDS, *_EDGES]) | _ANY.map(lambda text: f"'{text}'"), max_size=30).map(" ".join)
_STRINGS = st.text(st.characters(categories=["L", "N", "P", "S"]))


@given(_ANY | _ALMOST | st.builds("{} {}".format, st.sampled_from([*FILTER_COLUMNS]), _ALMOST))
def test_any_text_is_parsed_or_refused_with_a_code(text: str) -> None:
    parsed = None
    with suppress(FleetError):
        parsed = parse_device_filter(text)
    if parsed is None:
        with refused("filter-invalid") as caught:
            parse_device_filter(text)
        assert str(caught.value).isprintable()
    else:
        assert parsed.text.isprintable() and parse_device_filter(parsed.text) == parsed


@given(st.lists(_STRINGS, min_size=1, max_size=5))
def test_a_quoted_string_is_a_literal_whatever_it_contains(strings: list[str]) -> None:
    quoted = ", ".join(f"'{text.replace(chr(39), chr(39) * 2)}'" for text in strings)
    found = parse_device_filter(f"site IN ({quoted})").condition
    assert getattr(found, "values", None) == tuple(strings)
