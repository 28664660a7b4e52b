"""Query of the stream ``sessions``, without Spark: the number of its key groups."""

from pathlib import Path

import pytest

from fleetpulse.io.streams.sessions import fixed_key_groups
from tests.support.homes.homes import commit_batch
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def test_a_stream_keeps_the_number_of_key_groups_of_its_first_batch(tmp_path: Path) -> None:
    assert fixed_key_groups(tmp_path, 8) == 8
    assert fixed_key_groups(tmp_path, 16) == 16  # no batch has been started
    commit_batch(tmp_path, 0, 1, committed=False)
    assert fixed_key_groups(tmp_path, 32) == 16


def test_a_missing_number_of_key_groups_is_an_error(tmp_path: Path) -> None:
    commit_batch(tmp_path, 0, 1)
    with refused("checkpoint-damaged", match="fleet stream rebuild sessions"):
        fixed_key_groups(tmp_path, 8)
