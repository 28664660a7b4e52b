"""Command `fleet availability`: shares of the covered time of a day, and refused requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.commands.inspect.availability import availability
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import COVERAGE
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.homes import JudgedHome, empty
from tests.support.refusals import refused

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(10_000))]
DAY = "2023-11-14"  # the day of START


@pytest.fixture
def home(home: Home) -> Path:
    """Return a home with 4,000 s, a coverage gap of 1,000 s, and one device with signals for 1,000 s."""
    judged = JudgedHome(home)
    policy = parse_policy({"rules": {"timeout": "500s"}}).normalised()
    gap = [row(2000, "fleet/_/b/gap", op="open", from_s=1000), row(2000.5, "fleet/_/b/gap", op="close", until_s=2000)]
    judged.land_and_judge(row(0, "fleet/_/_/policy", policy=policy, effective_from_s=-3600))
    judged.land_and_judge(*(signal(at, "pump") for at in range(100, 1001, 100)), *gap, tick(4000))
    spans = [{"received_at_ms": entry.received_at_ms, "op": entry.contents()["op"]} for entry in gap]
    tables.append(judged.home, COVERAGE, tables.to_table(COVERAGE, spans), "test", 1)
    return judged.home.path


def test_the_available_share_excludes_coverage_gaps(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    availability(DAY, home, "site", json_lines=True)
    (share,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (share["day"], share["site"], share["devices"]) == (DAY, "site", 1)
    covered_s = (1000 - 100) + (3990 - 2000.5)  # from the first message to the gap, and from the gap to the frontier
    assert share["covered_ms"] == round(covered_s * 1000)
    assert share["available"] == share["online"] == pytest.approx((900 + 500) / covered_s)
    assert share["offline"] == pytest.approx(1 - share["online"])


def test_the_table_shows_shares_in_percent(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    availability(DAY, home, "device", json_lines=False)
    output = capsys.readouterr().out
    assert "pump" in output and " %" in output and "covered time 49m49s" in output


@pytest.mark.parametrize(
    ("options", "code", "error"),
    [
        ({"day": "2023-11-15"}, "day-not-judged", FleetError),
        ({"day": "yesterday"}, "date-invalid", Misuse),
        ({"day": DAY, "by": "gateway"}, "option-invalid", Misuse),
    ],
)
def test_days_without_judgements_and_invalid_options_are_refused(
    home: Path, options: dict[str, Any], code: str, error: type[FleetError]
) -> None:
    with refused(code, error):
        availability(home=home, **options)


def test_instants_that_the_verdict_jitter_may_delay_do_not_count_as_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = JudgedHome(empty(tmp_path / "home", Deployment(10_000, verdict_jitter_ms=600_000)))
    judged.land_and_judge(*(signal(at, "pump") for at in range(100, 4001, 100)))
    availability(DAY, judged.home.path, "site", json_lines=True)
    (share,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert share["judged_to"] == format_instant(START + 3_390_000)
    assert share["covered_ms"] == (3390 - 100) * 1000
