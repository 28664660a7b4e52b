"""Cached machine code: files of earlier sources are removed as far as the user's permissions allow."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetpulse.columnar.jit import cache

pytestmark = pytest.mark.unit


def test_a_folder_that_cannot_be_read_does_not_end_the_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = tmp_path / "columnar" / "jit" / "__pycache__"
    for folder in (tmp_path / "columnar" / "__pycache__", kernels / "fold-earlier", kernels / "fold-now"):
        folder.mkdir(parents=True)
    glob = Path.glob

    def closed(path: Path, pattern: str) -> Iterator[Path]:
        if path.parent in {tmp_path / "columnar", tmp_path / "columnar" / "__pycache__"}:
            raise PermissionError(path)  # as for another user; root can read every folder
        return iter(list(glob(path, pattern)))

    monkeypatch.setattr(cache, "PACKAGE", tmp_path)
    monkeypatch.setattr(Path, "glob", closed)
    compiled: Any = SimpleNamespace(stats=SimpleNamespace(cache_path=str(kernels / "fold-now")))
    cache.remove_outdated(compiled)
    assert [folder.name for folder in kernels.iterdir()] == ["fold-now"]
