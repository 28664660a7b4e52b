"""Output of rows: texts that devices choose are shown as they are, and break no output."""

from typing import Final

import pytest
from rich.text import Text

from cli.common.output import as_markup, as_shown, show

_TEXTS: Final = (
    r"\[/x]",
    r"\\[/x]",
    r"\[link=evil.example]pump-1",
    r"\[@x=(]",
    "[/]",
    "[red]a[/red]",
    "[[red]a",
    r"\[1]",
    r"\\[1]",
    r"\[a",
    "a[1]",
    "a\\",
    "\x1b[31m\n\u202e\x9b",
)


@pytest.mark.parametrize("text", _TEXTS)
def test_a_text_of_a_device_is_neither_markup_nor_control_characters(text: str) -> None:
    shown = Text.from_markup(as_markup(text))
    assert (shown.plain, shown.spans) == (as_shown(text), [])
    assert shown.plain.isprintable()


def test_no_text_of_a_device_ends_a_listing(capsys: pytest.CaptureFixture[str]) -> None:
    """A site such as the first of these could otherwise end ``./fleet up``, whose screen shows sites."""
    for text in _TEXTS:
        show([{"site": text}], ("site",), f"life of {text}", json_lines=False)
        show([], ("site",), f"life of {text}", json_lines=False)
    assert r"\[/x]" in capsys.readouterr().out
