"""Page of a device: its *why* for every trigger, beside the report and the API."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.amendments import corrections
from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.lifecycle import Trigger
from fleetpulse.core.replay import replay
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import DEVICES
from fleetpulse.core.times import format_duration, format_instant
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports.plain import plain_levels
from fleetpulse.reports.why import why
from fleetpulse.web.pages.rendering import device_path
from tests.support.asgi import Client
from tests.support.histories.histories import positioned, registry_entries, row, signal, tick
from tests.support.homes.homes import JudgedHome, empty
from tests.support.page_client import served
from tests.unit.core.explanation.test_explainers import CASES, DEPLOYMENT, IN_FORCE

pytestmark = pytest.mark.unit
END_S = 1_000
LATE = f"d-{Trigger.AMENDED}"  # device whose history a late message changes
FIRST = {trigger: rows for trigger, rows, *_ in reversed(CASES)}  # the first case of each trigger


def _of_case(trigger: Trigger, one: Row) -> Row:
    """Return a row of a case with a device and a gateway of its own."""
    names = {name: f"{name}-{trigger}" for name in ("d", "g")}
    gateway = one.gateway and names.get(one.gateway, one.gateway)
    return replace(one, device_id=names.get(one.device_id, one.device_id), gateway=gateway)


def _home(path: Path) -> JudgedHome:
    """Return a home with a device for each trigger: ``d-TRIGGER``."""
    judged = JudgedHome(empty(path, DEPLOYMENT))
    of_cases = [_of_case(trigger, one) for trigger, rows in FIRST.items() for one in rows]
    of_late = [signal(END_S - 130, LATE), signal(END_S - 50, LATE, received_s=END_S + 10, gateway="gw-late")]
    judged.land_and_judge(*positioned([IN_FORCE, *of_cases, *of_late, tick(END_S), tick(END_S + 10)]))
    found = corrections(judged.rows, DEPLOYMENT, [LATE])
    assert found, "the late signal changes the history"
    for one in found:
        judged.land_and_judge(*positioned([row(END_S + 11, one.topic, **one.payload), tick(END_S + 40)]))
    tables.append(judged.home, DEVICES, tables.to_table(DEVICES, registry_entries(judged.rows)), "test", 1)
    return judged


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> JudgedHome:
    return _home(tmp_path_factory.mktemp("triggers") / "home")


@pytest.fixture(scope="module")
def client(judged: JudgedHome) -> Iterator[Client]:
    with served(judged.home) as client:
        yield client


def _report(home: Home, device_id: str, at_ms: int | None = None, to_mode: str | None = None) -> dict[str, Any]:
    return why(home, device_id, judged_ms(home.checkpoint), at_ms, to_mode)


def _cells(table: str) -> list[list[str]]:
    """Return the cells of a table as texts; an instant is its ``datetime``."""
    rows = re.findall(r"<tr>(.*?)</tr>", table.partition("<tbody>")[2], re.DOTALL)
    return [[_text(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", one, re.DOTALL)] for one in rows]


def _text(html: str) -> str:
    instants = re.sub(r'<time datetime="([^"]*)".*?</time>', r"\1", html)
    return unescape(re.sub(r"<[^>]*>", "", instants)).strip()


def _panel(text: str) -> dict[str, Any]:
    """Return what a page explains: its headings and sentences, the arithmetic, and the rows."""
    panel = re.sub(r'<span class="ago".*?</span>', "", text)
    tables_of = re.findall(r"<table.*?</table>", panel, re.DOTALL)
    sums = [one for one in tables_of if 'class="sum"' in one]
    rows = re.findall(r'aria-label="Rows that the verdict depends on">(<table>.*?</table>)', panel, re.DOTALL)
    sentences = [_text(one) for one in re.findall(r"<p.*?</p>|<h2.*?</h2>", panel, re.DOTALL)]
    return {"sentences": sentences, "sum": [_cells(one) for one in sums], "rows": [_cells(one) for one in rows]}


def _expected_sum(terms: list[Mapping[str, Any]]) -> list[list[list[str]]]:
    """Return the arithmetic of a report as the page shows it."""
    lines = [
        [
            "+" if "span_ms" in one else "=" if place else "",
            format_duration(one["span_ms"]) if "span_ms" in one else format_instant(one["at_ms"]),
            one["meaning"],
        ]
        for place, one in enumerate(terms)
    ]
    return [lines] if lines else []


def _require_same(shown: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Check that a panel shows a report: sentence, arithmetic, rule, rows, judgement, and what would have prevented it."""
    sentences, since_ms = shown["sentences"], found["since_ms"]
    assert f"Why {found['mode']} since {format_instant(since_ms)}" in sentences
    assert f"{found['sentence'][:1].upper()}{found['sentence'][1:]}." in sentences
    assert shown["sum"] == _expected_sum(found["terms"])
    rule = [one for one in sentences if one.startswith("Rule ")]
    assert len(rule) == (found["rule"] is not None)
    if found["rule"] is not None:
        assert f"{found['rule']['key']} = {found['rule']['value']} of {found['rule']['of']}" in rule[0]
        assert rule[0].endswith(f"policy {found['rule']['policy_version']}")
    assert [line[0] for rows in shown["rows"] for line in rows] == [one["role"] for one in found["evidence"]]
    for line, one in zip((line for rows in shown["rows"] for line in rows), found["evidence"], strict=True):
        values = {format_instant(value) if name.endswith("_ms") else str(value) for name, value in one.items()}
        assert set(line) - {""} == values
    assert not found["otherwise"] or f"{found['otherwise']}." in sentences
    assert any(one.startswith(f"Judged {format_instant(found['judged']['judged_at_ms'])}") for one in sentences)
    assert not found["note"] or found["note"] in sentences


def _transition(judged: JudgedHome, trigger: Trigger) -> Judgement:
    """Return the newest transition by a trigger of the device that is for it."""
    found = [
        one
        for one in replay(judged.rows, DEPLOYMENT)
        if (one.kind, one.device_id, one.trigger) == (JudgementKind.TRANSITION, f"d-{trigger}", trigger)
    ]
    assert found, f'no device has the trigger "{trigger}": add a case to tests/unit/core/explanation/test_explainers.py'
    return found[-1]


@pytest.mark.parametrize("trigger", list(Trigger))
def test_the_explanation_of_every_trigger_is_that_of_the_report(judged: JudgedHome, client: Client, trigger: Trigger) -> None:
    one = _transition(judged, trigger)
    at_ms = one.event_time_ms
    assert at_ms is not None
    found = _report(judged.home, one.device_id, at_ms, one.to_mode)
    assert (found["transition"]["trigger"], found["mode"], found["since_ms"]) == (trigger, one.to_mode, at_ms)
    assert found["evidence"] and found["judged"] and not found["note"], "it is explained from the rows"
    text = client.get(device_path(one.device_id, at=at_ms, to=one.to_mode, span="all")).text
    _require_same(_panel(text[text.index('id="why"') : text.index('id="facts"')]), found)
    answer = client.get(f"/api/v1{device_path(one.device_id, 'why', at=format_instant(at_ms))}").json()
    assert answer == plain_levels(found), "it is the only transition of its instant"


@pytest.mark.parametrize(("trigger", "has_next"), [(Trigger.SILENCE, False), (Trigger.AMENDED, True)])
def test_the_explanation_of_the_present_mode_is_that_of_the_report(
    judged: JudgedHome, client: Client, trigger: Trigger, has_next: bool
) -> None:
    device_id = f"d-{trigger}"
    found = _report(judged.home, device_id)
    assert (found["next"] is not None) is has_next
    assert client.get(f"/api/v1{device_path(device_id, 'why')}").json() == plain_levels(found)
    shown = _panel(client.get(device_path(device_id, "why")).text)
    _require_same(shown, found)
    coming = [one for one in shown["sentences"] if one.startswith("Next ")]
    assert len(coming) == has_next and all(format_instant(found["next"]["at_ms"]) in one for one in coming)
