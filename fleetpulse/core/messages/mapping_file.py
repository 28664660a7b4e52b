"""Mapping files: their rules, parsed and checked.

Rule: a file is used as a whole or not at all. The error of an invalid file lists all faults.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, Final, cast
from zoneinfo import ZoneInfo

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.mapping import (
    IGNORE,
    PLACEHOLDERS,
    RESERVED_LEVELS,
    SEVERAL,
    KindByValue,
    MappingRule,
    Mappings,
    Path,
    PathCompiler,
    is_several,
    placeholder,
)
from fleetpulse.core.messages.text import MAX_TEXT
from fleetpulse.core.rows import WITHOUT_BODY, Kind

MAX_RULES: Final = 500
UNITS: Final = ("ms", "s", "us", "ns", "iso")
RECEIVED: Final = "received"
_FIELDS: Final = ("seq", "code", "boot", "session", "gateway", "firmware", "uptime_s")
_OPTIONS: Final = ("topic", "when", "each", "site", "device", "kind", "metrics", "ts", "ts_unit", "ts_zone", "ts_else")
_KEYS: Final = frozenset({*_OPTIONS, *_FIELDS})
_KINDS: Final = frozenset({*WITHOUT_BODY, IGNORE})


def parse_mappings(content: Mapping[str, Any], compile_path: PathCompiler) -> Mappings:
    """Parse the content of a mapping file: ``[[mapping]]`` tables, the rules.

    Args:
        content: content of the TOML file.
        compile_path: compiler of the paths in it.

    Raises:
        FleetError: an invalid file; the message lists all faults, one a line.
    """
    tables = content.get("mapping")
    listed = cast("list[Any]", tables) if isinstance(tables, list) else []
    faults = [f'"{key}" is unknown; a mapping file has [[mapping]] tables only' for key in content if key != "mapping"]
    if not listed:
        faults.append("a mapping file must have at least one [[mapping]] table")
    if len(listed) > MAX_RULES:
        faults.append(f"a mapping file has at most {MAX_RULES} rules; got {len(listed)}")
    rules = [_RuleParser(f"mapping {number}", table, compile_path, faults).rule() for number, table in enumerate(listed, 1)]
    if faults:
        raise FleetError("the mapping has faults:\n" + "\n".join(f"  {fault}" for fault in faults), code="mapping-faulty")
    return Mappings(rules)


class _RuleParser:
    """Parser of one rule; it appends faults to a list.

    Args:
        where: name of the rule in faults.
        table: content of the rule.
        compile_path: compiler of paths.
        faults: list of all faults.
    """

    def __init__(self, where: str, table: object, compile_path: PathCompiler, faults: list[str]) -> None:
        self._where, self._compile_path, self._faults = where, compile_path, faults
        self._table = _table(table) or {}

    def rule(self) -> MappingRule:
        """Return the rule; if it has faults, it must not be used."""
        for key in sorted(self._table.keys() - _KEYS):
            self._fault(f'"{key}" is unknown; use one of {", ".join(sorted(_KEYS))}')
        levels = self._topic()
        constants, ids, fields = dict[str, str](), dict[str, Path](), dict[str, Path]()
        for name in ("site", "device"):
            self._source(name, constants, ids, text_is="value")
        for name in ("ts", *_FIELDS):
            self._source(name, constants, fields, text_is="path")
        for name in constants.keys() - {"site", "device", "gateway"}:
            self._fault(f"{name} must be a path in the payload; only site, device, kind and gateway can be constants")
        kind = self._kind(constants)
        known = {*map(placeholder, levels), *constants, *ids, *(["kind"] if kind else [])}
        for name in PLACEHOLDERS:  # access rules rely on one source of the device, and of its site
            given = [*map(placeholder, levels)].count(name) + (name in ("device", "site") and name in self._table)
            if given > 1:
                self._fault(f"{name} has {given} sources; keep one of them")
        for name in () if constants.get("kind") == IGNORE else ("site", "device", "kind"):
            if name not in known and not (name == "kind" and "kind" in self._table):
                self._fault(f"{name} is missing; put {{{name}}} into the topic, or set {name} = ...")
        ts = fields.pop("ts", None)
        return MappingRule(
            levels,
            constants,
            kind,
            self._path("when"),
            self._path("each"),
            ids,
            ts,
            fields,
            self._path("metrics"),
            self._choice("ts_unit", UNITS, "ms"),
            self._zone(),
            self._choice("ts_else", (RECEIVED, ""), "") != RECEIVED,
        )

    def _fault(self, text: str) -> None:
        self._faults.append(f"{self._where}: {text}")

    def _topic(self) -> tuple[str, ...]:
        text = self._table.get("topic", "")
        levels = tuple(str(text).split("/"))
        if not isinstance(text, str) or not text:
            self._fault(f'topic must be a pattern of topics, such as "zigbee2mqtt/{{device}}"; got {text!r}')
            return levels
        if levels[0] in RESERVED_LEVELS or (levels[0].startswith("$") and levels[0] != "$aws"):
            self._fault(f'topic must not begin with {", ".join(RESERVED_LEVELS)}, or "$" (except "$aws"); got "{text}"')
        known = {f"{{{name}{several}}}" for name, several in product(PLACEHOLDERS, ("", SEVERAL))}
        for level in levels:
            if ("{" in level or "}" in level) and level not in known:
                names = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
                self._fault(f'a placeholder is a whole level: {names}, or {{device...}} for several levels; got "{level}"')
            elif level != "+" and ("+" in level or "#" in level):
                self._fault(f'a wildcard is a whole level: "+", or a placeholder such as {{device...}} for "#"; got "{level}"')
        if sum(map(is_several, levels)) > 1:
            self._fault(f'a topic has at most one placeholder for several levels; got "{text}"')
        if levels[0] == "+" or levels[0].startswith("{"):
            self._check_first_level(levels)
        return levels

    def _check_first_level(self, levels: tuple[str, ...]) -> None:
        """Refuse a pattern whose subscription would also match messages in fleetpulse's own format.

        A broker may deliver such a message twice.
        """
        if any(map(is_several, levels)):
            self._fault("a topic that begins with a placeholder must have a fixed number of levels")
        elif len(levels) == 4 and (levels[3] in frozenset(Kind) or levels[3] == "+" or levels[3].startswith("{")):
            self._fault("a topic of four levels that begins with a placeholder must end with a word that is no kind")

    def _source(self, name: str, constants: dict[str, str], paths: dict[str, Path], *, text_is: str) -> None:
        """Read the source of a field: a text, or a table with ``value`` or ``path``."""
        source: Any = self._table.get(name)
        if source is None:
            return
        given = {text_is: source} if (table := _table(source)) is None else table
        which, value = next(iter(given.items()), ("", ""))
        if len(given) != 1 or which not in ("value", "path") or not isinstance(value, str) or not value:
            self._fault(f'{name} must be a text, or a table with one of value = "..." and path = "..."; got {_toml(source)}')
        elif which == "value":
            constants[name] = value
        elif (path := self._compiled(name, value)) is not None:
            paths[name] = path

    def _kind(self, constants: dict[str, str]) -> KindByValue | None:
        source: Any = self._table.get("kind")
        if source is None:
            return None
        if isinstance(source, str):
            constants["kind"] = source
            self._check_kind(source)
            return None
        table = _table(source) or {}
        kinds = _table(table.get("values"))
        if not kinds or not table.keys() <= {"path", "values", "else"}:
            self._fault(
                'kind must be a text, or a table: { values = { online = "birth", offline = "death" } }, with path = "..." for a '
                f'value in the payload and else = "..." for other values; got {_toml(source)}'
            )
            return None
        by_value = {str(value): str(kind) for value, kind in kinds.items()}
        otherwise = str(table.get("else", IGNORE))
        for kind in (*by_value.values(), otherwise):
            self._check_kind(kind)
        path = self._compiled("the path of kind", str(table["path"])) if "path" in table else None
        return KindByValue(path, by_value, otherwise)

    def _check_kind(self, kind: str) -> None:
        if kind not in _KINDS:
            self._fault(f'kind must be one of {", ".join(sorted(_KINDS))}; got "{kind}"')

    def _path(self, name: str) -> Path | None:
        source = self._table.get(name)
        if source is None:
            return None
        if not isinstance(source, str) or not source:
            self._fault(f"{name} must be a path in the payload; got {_toml(source)}")
            return None
        return self._compiled(name, source)

    def _compiled(self, name: str, source: str) -> Path | None:
        try:
            return self._compile_path(source)
        except ValueError as error:
            self._fault(f'{name} is not a path: "{source}": {error}')
            return None

    def _choice(self, name: str, known: Iterable[str], default: str) -> str:
        value = self._table.get(name, default)
        if value not in known:
            self._fault(f"{name} must be one of {', '.join(word for word in known if word)}; got {_toml(value)}")
            return default
        return cast("str", value)

    def _zone(self) -> ZoneInfo | None:
        name = self._table.get("ts_zone")
        if name is None:
            return None
        try:
            return ZoneInfo(str(name))
        except (KeyError, OSError, ValueError):
            self._fault(f'ts_zone must be a name of the time zone database, such as "Europe/Oslo"; got {_toml(name)}')
            return None


def _table(value: object) -> Mapping[str, Any] | None:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else None


def _toml(value: object) -> str:
    """Return a value of a TOML file as text for an error."""
    try:
        return json.dumps(value)[:MAX_TEXT]
    except (TypeError, ValueError):
        return str(value)[:MAX_TEXT]
