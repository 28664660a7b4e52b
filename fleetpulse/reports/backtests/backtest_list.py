"""List of the backtests whose pages are in a home: those that the DAG `fleet_backtest` ran.

Rule: a page is untrusted text. Its figures are read from one element, and only numbers and a short name are taken.
"""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final, cast

from fleetpulse.core.operations.backtests import AFTER, BEFORE, CHANGES, FIGURES
from fleetpulse.io.home.home import Home

_PAGE: Final = "report.html"
_HEAD_BYTES: Final = 8_192  # of a page, which begins with the figures
_NUMBERS: Final = ("from_ms", "to_ms", "rows", "moved_by_ms", f"alerts_{BEFORE}", f"alerts_{AFTER}", *CHANGES)
_LONGEST_NAME: Final = 64


def backtests(home: Home) -> list[dict[str, Any]]:
    """Return the backtests with a folder in a home, the newest first.

    Returns:
        Rows with ``name``, that of the folder; ``at_ms``, the time of the newest file; ``has_page``; and
        ``figures``, those of the page by name. None if there is no page, or if it is of an older version.
    """
    rows: list[dict[str, Any]] = []
    for folder in _folders(home):
        page = folder / _PAGE
        is_page = page.is_file()
        try:
            at_ms = round((page if is_page else folder).stat().st_mtime * 1000)
            figures = _figures(page) if is_page else None
        except OSError:  # maintenance removes old ones
            continue
        rows.append({"name": folder.name, "at_ms": at_ms, "has_page": is_page, "figures": figures})
    return sorted(rows, key=lambda row: (-row["at_ms"], row["name"]))


def page_of(home: Home, name: str) -> Path | None:
    """Return the page of a backtest; None if there is none of that name."""
    found = next((folder / _PAGE for folder in _folders(home) if folder.name == name), None)
    return found if found is not None and found.is_file() and not found.is_symlink() else None


def _folders(home: Home) -> list[Path]:
    place = home.path / "airflow" / "fleet" / "backtests"  # see `orchestration.config.OrchestrationConfig.data_folder`
    return [folder for folder in place.iterdir() if folder.is_dir() and not folder.is_symlink()] if place.is_dir() else []


class _Head(HTMLParser):
    """Reader of the figures in the head of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.content: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "meta" and given.get("name") == FIGURES:
            self.content = given.get("content")


def _figures(page: Path) -> dict[str, Any] | None:
    with page.open(encoding="utf-8", errors="replace") as file:
        head = _Head()
        head.feed(file.read(_HEAD_BYTES))
    try:
        found: object = json.loads(head.content or "null")
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    known = cast("dict[str, object]", found)
    numbers = {name: value for name in _NUMBERS if isinstance(value := known.get(name), int)}
    return {**dict.fromkeys(_NUMBERS), **numbers, "policy_version": str(known.get("policy_version", ""))[:_LONGEST_NAME]}
