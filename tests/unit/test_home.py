"""A home is used by whom it fits, and refused in one sentence otherwise."""

from pathlib import Path

import pytest

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home import Home

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", ["a[b]", "per%20cent", "all*", "back\\slash"])
def test_a_home_whose_tables_could_not_be_read_is_refused_before_it_is_made(name: str, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="path has none of"):
        Home(tmp_path / name).prepare(None)
    assert not (tmp_path / name).exists()
