"""What the job makes of any history, in any batches and key groups, holds by every law: nothing is raised that is no fault."""

from pathlib import Path
from random import Random

import pytest

from tests.support.histories.histories import START
from tests.support.homes.quality import (
    DEPLOYMENT,
    eventful_history,
    failed_expectations,
    judged_home,
    judged_in_batches,
    random_history,
    with_site_gap,
    write_state,
)

pytestmark = [pytest.mark.property, pytest.mark.timeout(300)]  # on a busy machine the fold alone takes long to be loaded


@pytest.mark.parametrize("until_s", [340, 1000], ids=["while it does not listen", "after it"])
@pytest.mark.parametrize("seed", [1, 3, 5])
def test_a_history_in_which_a_bridge_held_back_its_sites_raises_nothing(seed: int, until_s: int, tmp_path: Path) -> None:
    rows = [one for one in with_site_gap(eventful_history(seed)) if one.received_at_ms < START + until_s * 1000]
    home = judged_home(tmp_path / "home", rows, DEPLOYMENT)
    write_state(home, judged_in_batches(rows, Random(seed), 2), key_groups=2)
    assert failed_expectations(home) == []


@pytest.mark.parametrize("seed", [0, 1, 8, 23, 39, 69])  # of the last three each lists copies of messages out of service
def test_a_history_that_was_judged_raises_nothing(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    rows = sorted(eventful_history(seed) if seed % 2 else random_history(seed), key=lambda one: one.received_at_ms)
    key_groups = random.choice((1, 2, 3))
    home = judged_home(tmp_path / "home", rows, DEPLOYMENT)
    write_state(home, judged_in_batches(rows, random, key_groups), key_groups=key_groups)
    assert failed_expectations(home) == []
