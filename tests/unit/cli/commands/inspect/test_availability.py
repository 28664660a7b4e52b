"""fleet availability: a day in shares, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.commands.inspect.availability import availability
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import COVERAGE, JUDGEMENTS
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports.availability import CoveredSpans, Span
from fleetpulse.reports.availability import availability as shares
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.homes import JudgedHome, empty

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(10_000))]
DAY = "2023-11-14"  # of the histories' first instant


@pytest.fixture
def home(home: Home) -> Path:
    """Return a home with one device that is heard for 1,000 s of 4,000, of which nobody listened for 1,000."""
    judged = JudgedHome(home)
    policy = parse_policy({"rules": {"timeout": "500s"}}).normalised()
    gap = [row(2000, "fleet/_/b/gap", op="open", from_s=1000), row(2000.5, "fleet/_/b/gap", op="close", until_s=2000)]
    judged.land_and_judge(row(0, "fleet/_/_/policy", policy=policy, effective_from_s=-3600))
    judged.land_and_judge(*(signal(at, "pump") for at in range(100, 1001, 100)), *gap, tick(4000))
    spans = [{"received_at_ms": one.received_at_ms, "op": one.contents()["op"]} for one in gap]
    tables.append(judged.home, COVERAGE, tables.to_table(COVERAGE, spans), "test", 1)
    return judged.home.path


def test_an_available_share_leaves_out_the_time_in_which_nobody_listened(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    availability(DAY, home, "site", json_lines=True)
    (told,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (told["day"], told["site"], told["devices"]) == (DAY, "site", 1)
    covered_s = (1000 - 100) + (3990 - 2000.5)  # from its first message to the gap, and from there to the frontier
    assert told["covered_ms"] == round(covered_s * 1000)
    assert told["available"] == told["online"] == pytest.approx((900 + 500) / covered_s)
    assert told["offline"] == pytest.approx(1 - told["online"])


def test_people_see_shares_in_percent(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    availability(DAY, home, "device", json_lines=False)
    said = capsys.readouterr().out
    assert "pump" in said and " %" in said and "covered time 49m49s" in said


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"day": "2023-11-15"}, FleetError, "cannot show --day 2023-11-15: "),
        ({"day": "yesterday"}, Misuse, 'got "yesterday"; write it like 2026-01-31'),
        ({"day": DAY, "by": "gateway"}, Misuse, '--by must be one of site, device; got "gateway"'),
    ],
)
def test_what_cannot_be_answered_is_refused(home: Path, asked: dict[str, Any], error: type[FleetError], said: str) -> None:
    with pytest.raises(error) as caught:
        availability(home=home, **asked)
    assert said in str(caught.value)


def test_what_a_jitter_may_hold_back_is_not_said_to_be_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged = JudgedHome(empty(tmp_path / "home", Deployment(10_000, verdict_jitter_ms=600_000)))
    judged.land_and_judge(*(signal(at, "pump") for at in range(100, 4001, 100)))
    availability(DAY, judged.home.path, "site", json_lines=True)
    (told,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told["judged_to"] == format_instant(START + 3_390_000)
    assert told["covered_ms"] == (3390 - 100) * 1000


def test_before_its_first_written_transition_a_device_is_in_the_mode_that_this_one_ended(tmp_path: Path) -> None:
    home = empty(tmp_path / "home", Deployment(10_000))
    at_ms, told = START + 300_000, {"kind": "transition", "device_id": "pump", "site": "site", "device_class": "default"}
    told |= {"life_ms": START, "event_time_ms": at_ms, "transition_no": 2, "from_mode": "offline", "to_mode": "online"}
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, [told]), "test", 1)
    (only,) = shares(home, CoveredSpans([[Span(START, START + 400_000)]]), ["site"])
    assert (only["provisioned"], only["offline"], only["online"]) == pytest.approx((0, 0.75, 0.25))
