"""Filters of devices: sentences of the grammar are parsed, and every other text is refused at its first wrong character."""

import re

import pytest

from fleetpulse.core.operations.device_filter import (
    FILTER_COLUMNS,
    MAX_CONDITIONS,
    MAX_DEPTH,
    MAX_FILTER,
    AllOf,
    AnyOf,
    Between,
    ColumnName,
    Comparison,
    Condition,
    Constant,
    In,
    Instant,
    IsNull,
    Like,
    Not,
    parse_device_filter,
)
from fleetpulse.paths import ROOT
from tests.support.refusals import refused

NORTH = Comparison("site", "=", "north")
_SENTENCES: dict[str, Condition] = {
    "site = 'north'": NORTH,
    " ( ( SITE='north' ) ) ": NORTH,
    "site <> speaks_from": Comparison("site", "!=", ColumnName("speaks_from")),
    "seq >= -3": Comparison("seq", ">=", -3),
    f"device_hash = {-(2**63)}": Comparison("device_hash", "=", -(2**63)),
    "last_seen < TIMESTAMP '1970-01-01T01:00:00+01:00'": Comparison("last_seen", "<", Instant(0)),
    "life > '1970-01-01T00:00:01.5Z'": Comparison("life", ">", Instant(1500)),
    "last_seen BETWEEN life AND '1970-01-01T00:00:00Z'": Between("last_seen", ColumnName("life"), Instant(0)),
    "device_id NOT IN ('a', 'it''s -- \"1\"; /* é */ `x`')": Not(In("device_id", ("a", 'it\'s -- "1"; /* é */ `x`'))),
    r"device_id LIKE 'pump\_%' and gateway is null": AllOf((Like("device_id", r"pump\_%"), IsNull("gateway"))),
    "mode != '' OR NOT site = 'north' AND boot IS NOT NULL": AnyOf(
        (Comparison("mode", "!=", ""), AllOf((Not(NORTH), Not(IsNull("boot")))))
    ),
    "(true OR false)\nAND site = 'north'": AllOf((AnyOf((Constant(True), Constant(False))), NORTH)),
    "NOT " * MAX_DEPTH + "TRUE": Constant(True),
}
_REFUSED: dict[str, int] = {  # number of the first wrong character
    "": 1,
    "IDENTIFIER('ref'||'lect')('java.lang.System','getProperty','user.name')='root'": 1,
    "raise_error((SELECT max(value) FROM text.`/path/secret`)) IS NULL": 1,
    "reflect('java.lang.System', 'exit') = '0'": 1,
    "site = upper('north')": 8,
    "site(1) = 'north'": 5,
    "site = (SELECT 'north')": 8,
    "site IN (SELECT site FROM devices)": 10,
    "EXISTS (SELECT 1)": 1,
    "site = CAST('1' AS STRING)": 8,
    "site = 'north'::string": 15,
    "exists(array(1), x -> true)": 1,
    "site = 'north'; DROP TABLE messages": 15,
    "site = 'north' -- all": 16,
    "site = 'north' /* all */": 16,
    "`site` = 'north'": 1,
    'site = "north"': 8,
    "site || 'x' = 'north'": 6,
    "site + 1 = 2": 6,
    "site <=> 'north'": 8,
    "site == 'north'": 7,
    "site.name = 'north'": 5,
    "site RLIKE '(a+)+$'": 6,
    "case when true then true end": 1,
    "\N{CYRILLIC SMALL LETTER DZE}ite = 'north'": 1,
    "\N{LATIN SMALL LETTER LONG S}ite = 'north'": 1,  # in upper case: SITE
    "site = 'north' \N{FULLWIDTH LATIN CAPITAL LETTER O}R true": 16,
    "site\u00a0= 'north'": 5,
    "site = 'no\u202erth'": 11,
    "site = 'a\nb'": 10,
    "site = '\udcff'": 9,
    "site = 'north": 8,
    "'north' = site": 1,
    "site = NULL": 8,
    "site IN ()": 10,
    "site IN ('a' 'b')": 14,
    "site = 3": 8,
    "seq = '3'": 7,
    "seq = 1.5": 7,
    "seq = 1e6": 7,
    f"seq = {2**63}": 7,
    f"seq = {'9' * 5000}": 7,
    "seq = ٣": 7,
    "seq LIKE '1%'": 5,
    "seq = site": 7,
    "last_seen > 'yesterday'": 13,
    "last_seen > '2026-01-31'": 13,
    "last_seen > '999999999999999999'": 13,
    "last_seen > TIMESTAMP site": 23,
    r"site LIKE 'a\'": 11,
    r"site LIKE 'a\b'": 11,
    "site LIKE '%a%b%c%'": 11,
    "part = 'group'": 1,
    "content IS NULL": 1,
    "site": 5,
    "site NOT NULL": 10,
    "site IS 'north'": 9,
    "site = 'a' AND": 15,
    "site = 'a' site = 'b'": 12,
    "(site = 'a'": 12,
    "site = 'a')": 11,
    "(" * 1000 + "true" + ")" * 1000: MAX_DEPTH + 2,
    "NOT " * 2000 + "true": 4 * MAX_DEPTH + 5,
    "true OR " * MAX_CONDITIONS + "true": 8 * MAX_CONDITIONS + 1,
    "site = 'a' OR " * 7500: MAX_FILTER + 1,
    "'" * 100_000: MAX_FILTER + 1,
}


@pytest.mark.parametrize("text", _SENTENCES, ids=range(len(_SENTENCES)))
def test_a_sentence_of_the_grammar_is_parsed(text: str) -> None:
    parsed, expected = parse_device_filter(text), _SENTENCES[text]
    for _ in range(text.startswith("NOT ") * MAX_DEPTH):
        expected = Not(expected)
    assert parsed.condition == expected and "\n" not in parsed.text


@pytest.mark.parametrize(("text", "place"), _REFUSED.items(), ids=range(len(_REFUSED)))
def test_any_other_text_is_refused_at_its_first_wrong_character(text: str, place: int) -> None:
    with refused("filter-invalid", match=rf" at character {place}: expected .+; found .+; compare columns") as caught:
        parse_device_filter(text)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_columns_of_other_parts_of_a_snapshot_are_no_columns_of_devices() -> None:
    assert {"device_id", "site", "mode", "last_seen", "seq"} < FILTER_COLUMNS.keys()
    of_others = {"part", "content", "received_at", "presence", "event_time", "position", "connection", "message_kind"}
    assert not FILTER_COLUMNS.keys() & {*of_others, "device_clock", "code", "digest"}
    assert set(FILTER_COLUMNS.values()) == {"string", "number", "instant"}


def test_the_filters_of_the_guide_are_sentences_of_the_grammar() -> None:
    shown = re.findall(r'--only "(.+)"$', (ROOT / "docs/how-to/move-the-state.md").read_text(), re.MULTILINE)
    assert len(shown) == 4 and all(parse_device_filter(text) for text in shown)
