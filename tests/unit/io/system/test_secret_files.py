"""Files with secrets: their mode, and one content for concurrent creators."""

from pathlib import Path

import pytest

from fleetpulse.io.system.secret_files import create_secret, write_secret

pytestmark = pytest.mark.unit


def test_only_the_owner_can_read_a_secret_and_the_first_creator_sets_it(tmp_path: Path) -> None:
    path = tmp_path / "a.secret"
    assert [create_secret(path, text) for text in ("first", "second")] == ["first", "first"]
    write_secret(path, "third")
    assert path.read_text() == "third"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"
