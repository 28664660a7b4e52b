"""Filter language that selects devices by columns of a snapshot, and its parser.

Rule: a text is either a sentence of this grammar or refused. The grammar has no functions, casts,
subqueries, comments or quoted names, so that a filter from a web form can only compare columns.

    filter     = all_of { OR all_of }
    all_of     = condition { AND condition }
    condition  = NOT condition | "(" filter ")" | TRUE | FALSE | column predicate
    predicate  = ( "=" | "!=" | "<>" | "<" | "<=" | ">" | ">=" ) operand
               | [ NOT ] BETWEEN operand AND operand
               | [ NOT ] IN "(" literal { "," literal } ")"
               | [ NOT ] LIKE string
               | IS [ NOT ] NULL
    operand    = literal | column
    literal    = string | number | instant

- Keywords and columns are written in either case. Columns are `FILTER_COLUMNS`; an operand has the
  type of the column before it.
- A string is in single quotes, and '' in it is a quote. All its characters are printable.
- A number is a whole number of 64 bits.
- An instant is a string of ISO 8601 with a zone, with or without TIMESTAMP before it. It is read to
  the millisecond.
- In a pattern of LIKE, % is any text, and _ any character. A backslash before %, _ or a backslash
  makes that character literal.

A comparison with a null is neither true nor false, as in SQL.
"""

import re
import unicodedata
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import DEVICE_SNAPSHOTS
from fleetpulse.core.times import END_OF_TIME_MS, parse_instant_ms

MAX_FILTER: Final = 16_384  # characters of a filter
MAX_DEPTH: Final = 32  # nested parentheses and NOT
MAX_CONDITIONS: Final = 100  # TRUE, FALSE and predicates: Spark takes 40 s to compile 1,500 of them
MAX_WILDCARDS: Final = 3  # % in a pattern: the time to match one grows with its length to this power

_OTHER_PARTS: Final = frozenset({  # columns without a value in rows of devices
    "part", "received_at", "presence", "event_time", "position", "connection", "message_kind", "device_clock", "code", "digest",
    "content",
})  # fmt: skip
_TYPES: Final = {"string": "string", "timestamp": "instant", "long": "number", "int": "number"}
FILTER_COLUMNS: Final = {  # type by name: string, number or instant
    column.name: _TYPES[column.type] for column in DEVICE_SNAPSHOTS.columns if column.name not in _OTHER_PARTS
}
_LITERALS: Final = {
    "string": "a string in single quotes",
    "number": "a whole number of 64 bits",
    "instant": "an instant such as '2026-01-31T12:00:00Z'",
}
_CONDITION: Final = "NOT, TRUE, FALSE, ( or a column such as device_id, site, device_class, gateway, mode, last_seen"
_ANYTHING: Final = "a column, a keyword, a comparison, a whole number or a string in single quotes"
_SIGNS: Final = ("=", "!=", "<>", "<", "<=", ">", ">=")
_KEYWORDS: Final = frozenset(["AND", "OR", "NOT", "IN", "LIKE", "BETWEEN", "IS", "NULL", "TRUE", "FALSE", "TIMESTAMP"])
_INT64: Final = range(-(2**63), 2**63)
_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r\n]+)|(?P<string>'(?:[^']|'')*+')|(?P<number>-?[0-9][0-9A-Za-z_.]*)|(?P<word>[A-Za-z_][0-9A-Za-z_]*)
    |(?P<sign>[<>!]=|<>|[=<>(),])""",
    re.VERBOSE,
)
_WHOLE: Final = re.compile(r"-?[0-9]{1,19}")
_PATTERN: Final = re.compile(r"(?:[^\\]|\\[\\%_])*+", re.DOTALL)
_SHOWN: Final = 40  # characters of a token in an error


@dataclass(frozen=True, slots=True)
class ColumnName:
    """Name of a column of `FILTER_COLUMNS`."""

    name: str


@dataclass(frozen=True, slots=True)
class Instant:
    """Literal of an instant, epoch milliseconds."""

    instant_ms: int


Literal: TypeAlias = str | int | Instant
Operand: TypeAlias = Literal | ColumnName


@dataclass(frozen=True, slots=True)
class Constant:
    """Condition with the same result for every device."""

    value: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of a column; `sign` is one of ``= != < <= > >=``."""

    column: str
    sign: str
    operand: Operand


@dataclass(frozen=True, slots=True)
class Between:
    """Condition that a value is in a range, which contains both of its ends."""

    column: str
    low: Operand
    high: Operand


@dataclass(frozen=True, slots=True)
class In:
    """Condition that a value is one of several values."""

    column: str
    values: tuple[Literal, ...]


@dataclass(frozen=True, slots=True)
class Like:
    """Condition that a whole value fits a pattern."""

    column: str
    pattern: str


@dataclass(frozen=True, slots=True)
class IsNull:
    """Condition that a column has no value."""

    column: str


@dataclass(frozen=True, slots=True)
class Not:
    """Negation."""

    condition: "Condition"


@dataclass(frozen=True, slots=True)
class AllOf:
    """Conjunction of two or more conditions."""

    conditions: tuple["Condition", ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Disjunction of two or more conditions."""

    conditions: tuple["Condition", ...]


Condition: TypeAlias = Constant | Comparison | Between | In | Like | IsNull | Not | AllOf | AnyOf


@dataclass(frozen=True, slots=True)
class DeviceFilter:
    """Parsed filter.

    Attributes:
        text: its text in one line.
        condition: its syntax tree.
    """

    text: str
    condition: Condition


def parse_device_filter(text: str) -> DeviceFilter:
    """Parse a filter.

    Args:
        text: sentence of the grammar above, at most `MAX_FILTER` characters.

    Raises:
        FleetError: the text is no such sentence; the error names the position, the expected and the
            found token.
    """
    if len(text) > MAX_FILTER:
        raise _invalid(MAX_FILTER, f"at most {MAX_FILTER:,} characters", f"{len(text):,}")
    parser = _Parser(_tokens(text))
    condition = parser.filter(0)
    parser.require_end()
    return DeviceFilter(re.sub(r"[\t\r\n]", " ", text), condition)  # strings contain none of these characters


def _invalid(place: int, expected: str, found: str) -> FleetError:
    return FleetError(
        f"the filter of devices is invalid at character {place + 1}: expected {expected}; found {found}; compare columns with "
        f"literals, such as: site = 'north' AND mode != 'offline'",
        code="filter-invalid",
    )


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # string, number, word, keyword, sign, end
    text: str  # keywords in upper case, columns in lower case
    place: int

    @property
    def shown(self) -> str:
        if self.kind == "end":
            return "the end of the filter"
        return self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."


def _tokens(text: str) -> Iterator[_Token]:
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            if text[place] == "'":
                raise _invalid(place, "a closing single quote", "a string without an end")
            raise _invalid(place, _ANYTHING, _character(text[place]))
        kind, word = str(match.lastgroup), match[0]
        if kind == "string" and not word.isprintable():
            at = next(at for at, character in enumerate(word) if not character.isprintable())
            raise _invalid(place + at, "printable characters in a string", _character(word[at]))
        if kind == "word":
            kind, word = ("keyword", word.upper()) if word.upper() in _KEYWORDS else ("word", word.lower())
        if kind != "space":
            yield _Token(kind, word, place)
        place = match.end()
    yield _Token("end", "", len(text))


def _character(character: str) -> str:
    code, name = f"U+{ord(character):04X}", unicodedata.name(character, "")
    if character.isascii():
        return character if character.isprintable() else code
    return f"{code} {name}".rstrip()


class _Parser:
    """Recursive descent with one token ahead; each method takes the tokens of the rule that it is named after.

    Later tokens are read as they are needed, so an error is at the first wrong one.
    """

    def __init__(self, tokens: Iterator[_Token]) -> None:
        self._rest = tokens
        self._conditions = 0
        self._token = next(tokens)

    def filter(self, depth: int) -> Condition:
        conditions = [self._all_of(depth)]
        while self._takes("OR"):
            conditions.append(self._all_of(depth))
        return conditions[0] if len(conditions) == 1 else AnyOf(tuple(conditions))

    def require_end(self) -> None:
        if self._token.kind != "end":
            raise self._unexpected("AND, OR or the end of the filter")

    def _unexpected(self, expected: str) -> FleetError:
        return _invalid(self._token.place, expected, self._token.shown)

    def _takes(self, *words: str) -> str | None:
        """Take the next token if it is one of these keywords or signs; return its text."""
        token = self._token
        if token.kind not in ("keyword", "sign") or token.text not in words:
            return None
        self._token = next(self._rest)
        return token.text

    def _require(self, word: str, expected: str = "") -> None:
        if not self._takes(word):
            raise self._unexpected(expected or word)

    def _all_of(self, depth: int) -> Condition:
        conditions = [self._condition(depth)]
        while self._takes("AND"):
            conditions.append(self._condition(depth))
        return conditions[0] if len(conditions) == 1 else AllOf(tuple(conditions))

    def _condition(self, depth: int) -> Condition:
        if depth > MAX_DEPTH:
            raise self._unexpected(f"at most {MAX_DEPTH} nested parentheses and NOT")
        if self._takes("NOT"):
            return Not(self._condition(depth + 1))
        if self._takes("("):
            condition = self.filter(depth + 1)
            self._require(")", "AND, OR or )")
            return condition
        self._conditions += 1
        if self._conditions > MAX_CONDITIONS:
            raise self._unexpected(f"at most {MAX_CONDITIONS} conditions (IN takes any number of values)")
        if constant := self._takes("TRUE", "FALSE"):
            return Constant(constant == "TRUE")
        return self._predicate(self._column(_CONDITION))

    def _column(self, expected: str, kinds: Collection[str] = tuple(_LITERALS)) -> str:
        name = self._token.text
        if self._token.kind != "word" or FILTER_COLUMNS.get(name) not in kinds:
            raise self._unexpected(expected)
        self._token = next(self._rest)
        return name

    def _predicate(self, column: str) -> Condition:
        kind = FILTER_COLUMNS[column]
        if sign := self._takes(*_SIGNS):
            return Comparison(column, "!=" if sign == "<>" else sign, self._operand(kind))
        if self._takes("IS"):
            negated = self._takes("NOT")
            self._require("NULL", "NULL" if negated else "NULL or NOT NULL")
            return _negated(IsNull(column), negated)
        negated = self._takes("NOT")
        if self._takes("IN"):
            return _negated(In(column, self._values(kind)), negated)
        if self._takes("BETWEEN"):
            low = self._operand(kind)
            self._require("AND")
            return _negated(Between(column, low, self._operand(kind)), negated)
        if kind == "string" and self._takes("LIKE"):
            return _negated(Like(column, self._pattern()), negated)
        like = "BETWEEN or LIKE" if kind == "string" else "or BETWEEN"
        raise self._unexpected(f"IN, {like}" if negated else f"{', '.join(_SIGNS)}, IS, NOT, IN, {like}")

    def _operand(self, kind: str) -> Operand:
        if self._token.kind == "word":
            return ColumnName(self._column(f"{_LITERALS[kind]}, or a column of type {kind}", (kind,)))
        return self._literal(kind)

    def _values(self, kind: str) -> tuple[Literal, ...]:
        self._require("(")
        values = [self._literal(kind)]
        while self._takes(","):
            values.append(self._literal(kind))
        self._require(")", ", or )")
        return tuple(values)

    def _literal(self, kind: str) -> Literal:
        if kind == "instant":
            self._takes("TIMESTAMP")
        value: Literal | None = None
        token = self._token
        if token.kind == "number" and kind == "number":
            value = int(token.text) if _WHOLE.fullmatch(token.text) and int(token.text) in _INT64 else None
        elif token.kind == "string" and kind != "number":
            string = token.text[1:-1].replace("''", "'")
            value = string if kind == "string" else _instant(string)
        if value is None:
            raise self._unexpected(_LITERALS[kind])
        self._token = next(self._rest)
        return value

    def _pattern(self) -> str:
        at = self._token
        pattern = str(self._literal("string"))
        if not _PATTERN.fullmatch(pattern):
            raise _invalid(at.place, "a pattern in which %, _ or \\ comes after each \\", at.shown)
        if re.sub(r"\\.", "", pattern).count("%") > MAX_WILDCARDS:
            raise _invalid(at.place, f"a pattern with at most {MAX_WILDCARDS} %", at.shown)
        return pattern


def _negated(condition: Condition, negated: str | None) -> Condition:
    return Not(condition) if negated else condition


def _instant(text: str) -> Instant | None:
    try:
        instant_ms = parse_instant_ms(text)
    except FleetError:
        return None
    return Instant(instant_ms) if instant_ms <= END_OF_TIME_MS else None
