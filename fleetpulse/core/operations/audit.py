"""Arguments of an action as the bounded text of an audit record, without secrets.

Rule: a value is withheld if its name, or a name inside its text, is that of a secret.
"""

import json
import re
from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Any, Final, cast

from fleetpulse.core.operations.secret_files import SECRET_NAME, SENSITIVE_WORDS

WITHHELD: Final = "***"
MAX_CHARS: Final = 500  # of one text
MAX_VALUES: Final = 20  # of one list
_SCANNED: Final = 4 * MAX_CHARS  # a secret may begin before the cut and be recognised only by its end
_SECRET_IN_TEXT: Final = re.compile(
    rf"""((?:{SENSITIVE_WORDS})[\w.-]*["']?\s*[=:]\s*)(?:"[^"]*"?|'[^']*'?|[^\s,;&]+)""", re.IGNORECASE
)  # password=..., "token": "..."
_USER_INFO: Final = re.compile(r"(://)[^/\s@]+@")  # mqtt://user:password@host


class Phase(StrEnum):
    """Part of an action that a record describes."""

    STARTED = "started"
    FINISHED = "finished"


def recorded_text(text: str) -> str:
    """Return a text for a record: without secrets, valid Unicode, of at most `MAX_CHARS`."""
    valid = text[:_SCANNED].encode("utf-8", "backslashreplace").decode()  # an argument of invalid UTF-8 has surrogates
    shown = _USER_INFO.sub(rf"\1{WITHHELD}@", _SECRET_IN_TEXT.sub(rf"\1{WITHHELD}", valid))
    return shown if len(shown) <= MAX_CHARS and len(text) <= _SCANNED else f"{shown[:MAX_CHARS]}..."


def recorded_arguments(arguments: Mapping[str, Any]) -> str:
    """Return arguments as a JSON object; those that are absent, false or empty are left out.

    Args:
        arguments: values by name; the underscore after a name such as ``from_`` is removed.
    """
    given = {
        name.rstrip("_"): value for name, value in arguments.items() if not (value is None or value is False or value in ([], ()))
    }
    shown = {name: WITHHELD if SECRET_NAME.search(name) else _recorded(value) for name, value in given.items()}
    return json.dumps(shown, ensure_ascii=False)


def _recorded(value: object) -> object:
    if isinstance(value, list | tuple):
        values = list(cast("list[object] | tuple[object, ...]", value))
        more = [f"and {len(values) - MAX_VALUES} more"] if len(values) > MAX_VALUES else []
        return [*map(_recorded, values[:MAX_VALUES]), *more]
    if isinstance(value, Enum):
        return recorded_text(str(value.value))
    return value if isinstance(value, bool | int | float) else recorded_text(str(value))
