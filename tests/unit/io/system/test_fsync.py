"""Atomic replacement of a file: a failed write leaves the old content and no other file."""

import os
from pathlib import Path

import pytest

from fleetpulse.io.system.fsync import atomic_write

pytestmark = pytest.mark.unit


def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "record.json"
    atomic_write(file, "old")

    def fail(_: int) -> None:
        assert file.read_text() == "old", "a reader sees no incomplete content"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            atomic_write(file, "new")
    assert file.read_text() == "old" and [*tmp_path.iterdir()] == [file]


def test_a_leftover_of_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    (tmp_path / "record.json.new").write_text("a longer text, of which a part was written")
    atomic_write(file, "new", mode=0o600)
    assert file.read_text() == "new" and [*tmp_path.iterdir()] == [file]
    assert file.stat().st_mode & 0o077 == 0
