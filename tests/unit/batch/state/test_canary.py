"""Comparison of two generations: a row for several messages equals one row for each, for any cut into calls."""

import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from batch.state.canary import _compare_judgements  # pyright: ignore[reportPrivateUsage]
from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.tables import tables
from tests.support.histories.floods import flood, summed
from tests.support.homes.homes import empty
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def _written(path: Path, *calls: Sequence[Judgement]) -> list[Path]:
    home = empty(path, Deployment())
    for number, judgements in enumerate(calls, 1):
        rows = [{**asdict(one), "last_errors": None} for one in judgements]
        tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "job", number)
    return [*tables.paths_of(home, JUDGEMENTS)]


def test_rows_for_several_messages_are_compared_by_their_sums(tmp_path: Path) -> None:
    judged = [*flood(random.Random(1), 300, devices="ab"), Judgement(JudgementKind.TRANSITION, "a")]
    was = _written(tmp_path / "was", summed(judged[:90]), summed(judged[90:]))
    assert _compare_judgements(tmp_path, was, _written(tmp_path / "now", judged[:5], judged[5:]), []) == len(judged)
    with refused("canary-differs", match="1 judgements are missing, 0 are additional"):
        _compare_judgements(tmp_path, was, _written(tmp_path / "less", judged[1:]), [])
    with refused("canary-differs", match="0 judgements are missing, 1 are additional"):
        _compare_judgements(tmp_path, was, _written(tmp_path / "more", [*judged, judged[100]]), [])
    with refused("canary-differs", match="1 judgements are missing, 1 are additional"):
        _compare_judgements(tmp_path, was, _written(tmp_path / "other", [*judged[:-1], replace(judged[-1], device_id="z")]), [])
