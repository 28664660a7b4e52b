"""Commands in the documents: lines of ``sh`` blocks, and commands in running text."""

import re
from pathlib import Path
from typing import Final

_BLOCK: Final = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN: Final = re.compile(r"`(\./fleet [^`|]+)`")
_COMMENT: Final = re.compile(r"""\s#\s.*$""")


def shell_lines(document: Path) -> list[str]:
    """Return the lines of all ``sh`` blocks, without comments; continued lines are joined."""
    lines: list[str] = []
    for block in _BLOCK.findall(document.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            if stripped := _COMMENT.sub("", line).strip():
                lines.append(stripped)
    return lines


def commands_of(document: Path) -> list[str]:
    """Return the commands in ``sh`` blocks of a document, and those of ``./fleet`` in running text."""
    lines = [part.strip() for line in shell_lines(document) for part in re.split(r"&&|;|\|", line)]
    spans = [one for one in _SPAN.findall(document.read_text()) if "..." not in one]
    return [*lines, *spans]
