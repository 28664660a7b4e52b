"""Pages of the streams: rows, filters, empty states, untrusted text, and the part of a device's page."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.rollouts.cohorts import cohort_of
from fleetpulse.core.rollouts.plan import parse_rollout_plan
from fleetpulse.core.rollouts.rollout import CohortRecord, Rollout, Status
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.rollouts import StoredRollout
from fleetpulse.io.home.services import Service, served
from fleetpulse.io.system.process import write_status
from fleetpulse.web.app import create_app
from fleetpulse.web.pages.rendering import device_path
from fleetpulse.web.pages.streams import TABS
from tests.support.asgi import Client
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.rolled_out import TIMEOUT_S, RolledOutHome
from tests.support.homes.served import ServedHome
from tests.support.homes.streams import MINUTE_MS, STOPPED, add_commands, add_sessions, add_streams
from tests.support.page_client import VIEWER
from tests.support.page_client import served as served_pages

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(1_000, 300_000))]
HOSTILE = "<script>alert(1)</script>"
END_MS = START + 300_000


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Serve a home in which one device has results of all streams."""
    made = ServedHome(tmp_path_factory.mktemp("streams") / "home")
    made.batch(signal(10, "pump"), tick(60))
    for device_id in ("pump", HOSTILE):
        add_streams(made.home, device_id, END_MS) if device_id == "pump" else add_commands(made.home, device_id, END_MS)
    add_sessions(made.home, HOSTILE, END_MS)
    with served_pages(made.home) as client:
        yield client


def text_of(client: Client, path: str) -> str:
    """Return a page, which has no inline code and no text of a device as an element."""
    answer = client.get(path)
    assert answer.status == 200, answer.text
    assert not re.search(r"<script(?![^>]* src=)|\sstyle=|\son\w+=", answer.text), "inline code is forbidden by the policy"
    assert "<script>" not in answer.text and "<b>now" not in answer.text and "<i>" not in answer.text
    return answer.text


def rows_of(text: str) -> list[str]:
    """Return the rows of the tables of a page."""
    return re.findall(r"<tr data-row>.*?</tr>", text, re.DOTALL)


def empty_client(home: Home, **streams: Any) -> Client:
    write_status(home.run("lifecycle"), {"state": "running", "streams": streams})
    return Client(create_app(home, hosts=("localhost",), authenticate=lambda _: VIEWER))


def test_tabs_lead_to_each_page_and_mark_it(client: Client) -> None:
    for _, path in TABS:
        text = text_of(client, path)
        tabs = text.partition('aria-label="Streams"')[2].partition("</nav>")[0]
        assert re.findall(r'href="([^"]*)" aria-current="page"', tabs) == [path]
        assert re.findall(r'href="([^"]*)"', tabs) == [one for _, one in TABS]
        assert re.search(r'<a href="/stream" aria-current="page">Streams</a>', text)


def test_commands_have_their_states_and_the_device_as_text(client: Client) -> None:
    rows = rows_of(text_of(client, "/stream/commands"))
    assert len(rows) == 10, "the commands of two days before are out of the range"
    for state in ("acknowledged", "rejected", "timed out", "pending", "unmatched"):
        assert sum(f"</svg>{state}</span>" in row for row in rows) == 2, state
    [acknowledged] = [row for row in rows if "acknowledged" in row and ">pump<" in row]
    assert "after 1s500ms" in acknowledged and "&#34;interval&#34;:30" in acknowledged and "&lt;script&gt;" in acknowledged
    assert device_path(HOSTILE) in unescape("".join(rows))
    assert len(rows_of(text_of(client, "/stream/commands?last=all"))) == 12


@pytest.mark.parametrize(
    ("query", "count"),
    [("device=pump", 6), ("device=pump&last=24", 5), ("status=pending", 2), ("status=pending&device=nobody", 0)],
)
def test_filters_of_commands_are_those_of_the_api_and_of_its_files(client: Client, query: str, count: int) -> None:
    text = text_of(client, f"/stream/commands?{query}")
    assert len(rows_of(text)) == count
    assert ("No command in this range" in text) == (count == 0)
    [csv_address] = re.findall(r'href="(/api/v1/commands\.csv[^"]*)"', text)
    answer = client.get(unescape(csv_address))
    assert answer.status == 200 and len(answer.text.splitlines()) == count + 1


def test_sessions_are_open_or_ended_with_reason_and_duration(client: Client) -> None:
    text = text_of(client, "/stream/sessions")
    opened, _, ended = text.partition('id="h-ended"')
    assert len(rows_of(opened)) == 2 and len(rows_of(ended)) == 8
    for reason in ("will", "disconnect", "birth", "silence"):
        assert sum(f"</svg>{reason}</span>" in row for row in rows_of(ended)) == 2
    assert all("9m" in row for row in rows_of(ended))
    only = text_of(client, "/stream/sessions?state=will&device=pump")
    assert len(rows_of(only)) == 1 and 'id="h-will"' in only and 'id="h-open"' not in only
    assert len(rows_of(text_of(client, "/stream/sessions?state=open&device=pump"))) == 1
    assert "No such session in this range" in text_of(client, "/stream/sessions?device=nobody")


def test_vitals_of_a_device_are_a_chart_with_its_table(client: Client) -> None:
    text = text_of(client, "/stream/vitals?device=pump")
    assert len(re.findall(r'<rect class="v-range" x="\d+\.', text)) == 6 and 'class="v-mean" x' in text
    rows = rows_of(text)
    alarm = rows.pop()
    assert len(rows) == 7 and sum('<span class="warn">late</span>' in row for row in rows) == 1
    assert "below 3.2 for 20m" in alarm and ">3.1<" in alarm
    assert ">40.5<" in rows[-1], "the first metric is chosen: <i>load</i>"
    battery = text_of(client, "/stream/vitals?device=pump&metric=battery")
    assert all(f">{value}<" in rows_of(battery)[-2] for value in ("3", "3.5", "4", "3.7"))
    assert "Choose a device" in text_of(client, "/stream/vitals") or "The stream vitals is off" in text_of(
        client, "/stream/vitals"
    )
    assert "The stream vitals is off" in text_of(client, "/stream/vitals?device=nobody")


def test_a_rollout_has_its_cohorts_with_arithmetic_and_the_commands_of_its_steps(client: Client) -> None:
    text = text_of(client, "/stream/rollouts")
    assert re.findall(r'href="/stream/rollouts/([^"]+)"', text) == ["pumps-2", "bad-3"], "the newest is first"
    assert "2.0&lt;b&gt;" in text and STOPPED in text
    assert "./fleet rollout start plan.toml" in re.sub(r"<[^>]+>", "", text)
    stopped = text_of(client, "/stream/rollouts/bad-3")
    assert "stopped</span>" in stopped and STOPPED in rows_of(stopped)[0] and "not started" in rows_of(stopped)[2]
    assert "5 points more offline devices" in stopped and "rollout advance" not in re.sub(r"<[^>]+>", "", stopped)
    running = text_of(client, "/stream/rollouts/pumps-2")
    assert "waiting</span>" in rows_of(running)[0] and "no verdict is recorded yet" in running
    shown = re.sub(r"<[^>]+>", "", running)
    assert all(f"rollout {verb} pumps-2" in shown for verb in ("check", "advance", "stop"))
    for name in ("none", "..", "%2e%2e", "pumps-2%2f..", "rollout.json"):
        assert client.get(f"/stream/rollouts/{name}").status == 404, name


def test_the_newest_cohort_is_judged_on_request_and_nothing_is_recorded(tmp_path: Path) -> None:
    fleet = RolledOutHome(tmp_path / "home")
    content = {"name": "pumps-2", "version": "2.0", "scope": "TRUE", "soak": "2m", "least_devices": 5, "cohorts": [30, 60, 100]}
    plan = parse_rollout_plan(content)
    cohort = [name for name in fleet.pumps if cohort_of(plan.name, name, plan.cohorts) == 1]
    stored = StoredRollout(fleet.home, plan.name)
    stored.create([(name, "north") for name in fleet.pumps])
    stored.write(Rollout(plan, 40, "ann", (CohortRecord(1, len(cohort), "ann", fleet.now_ms, fleet.now_ms),)))
    fleet.run(40 + TIMEOUT_S, silent=cohort)
    with served_pages(fleet.home) as client:
        assert "Judge the cohort from its messages" in text_of(client, "/stream/rollouts/pumps-2")
        text = text_of(client, "/stream/rollouts/pumps-2?judge=true").partition('id="judged"')[2]
    size = len(cohort)
    assert f"{size} of {size} (100.0 %) devices went offline, of the rest 0 of {40 - size} (0.0 %)" in text
    assert re.search(rf'cohort</th><td class="num">{size}</td><td class="num">{size}</td>', text)
    assert stored.read().status is Status.RUNNING and stored.read().current.verdict is None


@pytest.mark.parametrize(
    "address",
    ["/stream/commands?status=x", "/stream/commands?last=5", "/stream/commands?after=x", "/stream/sessions?state=x",
     "/stream/vitals?device=pump&last=0", "/stream/sessions?device=" + "d" * 300],
)  # fmt: skip
def test_an_invalid_parameter_is_refused(client: Client, address: str) -> None:
    assert client.get(address).status == 400


def test_a_list_continues_on_the_next_page(home: Home) -> None:
    for number in range(15):
        add_commands(home, f"d-{number:02}", END_MS - number * MINUTE_MS)
    client, seen, address = empty_client(home), list[str](), "/stream/commands?status=pending&last=all"
    for number in range(45):
        add_commands(home, f"e-{number:02}", END_MS - number)
    while address:
        text = text_of(client, address)
        rows = rows_of(text)
        assert len(rows) <= 50
        seen += [re.findall(r"<bdi>(.*?)</bdi>", row)[0] for row in rows]
        following = re.findall(r'<a href="([^"]*)" rel="next"', text)
        address = unescape(following[0]) if following else ""
    assert len(seen) == 2 * len({*seen}) == 120, "each device has two pending commands"


def test_empty_pages_name_the_setting_or_say_that_nothing_happened(home: Home) -> None:
    client = empty_client(home)
    for path, stream in (("/stream/commands", "commands"), ("/stream/sessions", "sessions"), ("/stream/vitals", "vitals")):
        text = text_of(client, path)
        assert (
            f"The stream {stream} is off" in text and f'<code>"{stream}"</code> to <code>streams</code> in settings.toml' in text
        )
    assert "No rollout yet" in text_of(client, "/stream/rollouts")
    running = {"state": "running", "batch": 1, "failures": 0, "error": None}
    client = empty_client(home, commands=running, sessions=running, vitals=running)
    with served(home, Service.LIFECYCLE):
        assert "No command in this range" in text_of(client, "/stream/commands")
        assert "No such session in this range" in text_of(client, "/stream/sessions")
        assert "Choose a device" in text_of(client, "/stream/vitals")
        assert "No closed window of this device" in text_of(client, "/stream/vitals?device=pump")


def test_the_fault_of_a_stream_is_above_its_rows(home: Home) -> None:
    add_commands(home, "pump", END_MS)
    failed = {"state": "failed", "batch": 1, "failures": 3, "error": "no <script>"}
    client = empty_client(home, commands=failed)
    with served(home, Service.LIFECYCLE):
        text = text_of(client, "/stream/commands")
    assert "The stream commands has failed</b> 3 times" in text and "no &lt;script&gt;" in text


def test_the_page_of_a_device_has_its_sessions_vitals_and_twin(client: Client) -> None:
    assert 'hx-get="/devices/pump/streams"' in text_of(client, "/devices/pump")
    for address in ("/devices/pump/streams", "/devices/pump?streams=1"):
        text = text_of(client, address).partition('id="h-beside"')[2]
        assert "open</span>" in text and "All sessions of the device" in text
        assert re.search(r'metric=battery"><bdi>battery</bdi></a></th><td>.*?<td class="num">4.2</td>', text)
        assert re.search(r"<dt>desired</dt><dd><code[^>]*>{&#34;interval&#34;:30,", text)
        assert re.search(r"<dt>reported</dt><dd><code[^>]*>{&#34;interval&#34;:60}", text)
        assert [*re.findall(r"<dt>(\w+)</dt>", text)][:4] == ["desired", "reported", "difference", "metrics"], (
            "the words of fleet twin"
        )
        assert re.search(r"<dt>difference</dt><dd><span class=\"warn\"><code[^>]*>{&#34;interval&#34;:30,", text)
        assert "firmware" in text and "All commands to the device" in text


def test_the_page_of_a_device_without_streams_says_so(tmp_path: Path) -> None:
    made = ServedHome(tmp_path / "home")
    made.batch(signal(10, "pump"), tick(60))
    with served_pages(made.home) as client:
        assert "No stream is on" in text_of(client, "/devices/pump/streams")
