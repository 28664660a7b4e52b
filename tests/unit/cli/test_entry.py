"""Entry point of the command: exit codes."""

import sys
from pathlib import Path

import pytest

from cli.entry import run

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["version"], 0, ""),
        (["availability", "--day", "2026-01-31"], 1, "fleet: "),  # there is no home
        (["availability", "--day", "2026-01-31", "--by", "gateway"], 2, "fleet: --by must be one of "),
        (["devices", "--no-such-option"], 2, "Usage: "),
    ],
)
def test_the_exit_code_is_1_for_a_refusal_and_2_for_misuse(
    words: list[str],
    code: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = [] if words == ["version"] else ["--home", str(tmp_path / "none")]
    monkeypatch.setattr(sys, "argv", ["fleet", *words, *home])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == code
    assert capsys.readouterr().err.startswith(text)
