"""Quality suites on tables of the job: no expectation fails for any history, batches and key groups."""

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

pytestmark = [pytest.mark.property, pytest.mark.timeout(300)]  # loading the fold takes long on a busy machine


@pytest.mark.parametrize("until_s", [340, 1000], ids=["during-the-gap", "after-the-gap"])
@pytest.mark.parametrize("seed", [1, 3, 5])
def test_a_history_with_a_gap_of_some_sites_fails_no_expectation(seed: int, until_s: int, tmp_path: Path) -> None:
    rows = [one for one in with_site_gap(eventful_history(seed)) if one.received_at_ms < START + until_s * 1000]
    home = judged_home(tmp_path / "home", rows, DEPLOYMENT)
    write_state(home, judged_in_batches(rows, Random(seed), 2), key_groups=2)
    assert failed_expectations(home) == []


@pytest.mark.parametrize(
    "seed", [0, 1, 8, 23, 39, 69]
)  # the last three seeds have duplicates of messages of devices out of service
def test_a_judged_history_fails_no_expectation(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    rows = sorted(eventful_history(seed) if seed % 2 else random_history(seed), key=lambda one: one.received_at_ms)
    key_groups = random.choice((1, 2, 3))
    home = judged_home(tmp_path / "home", rows, DEPLOYMENT)
    write_state(home, judged_in_batches(rows, random, key_groups), key_groups=key_groups)
    assert failed_expectations(home) == []
