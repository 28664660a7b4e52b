"""Policy and mapping files that are not TOML."""

from pathlib import Path

import pytest

from cli.common.policy_files import policy_of
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("content", [b"[rules", b"\xff", b"a = " + b"[" * 10_000 + b"]" * 10_000])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "policy.toml").write_bytes(content)
    with refused("toml-invalid"):
        policy_of(tmp_path / "policy.toml", None)
