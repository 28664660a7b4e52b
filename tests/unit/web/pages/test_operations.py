"""Pages Streams, State, Quality and Backtest over fixture homes: figures, empty states, and untrusted text."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.monitoring.health import THRESHOLDS
from fleetpulse.core.replay import Deployment
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.tables import COVERAGE, JUDGEMENTS, QUALITY_FAILURES, QUALITY_RESULTS, QUARANTINE, STREAM_HEALTH
from fleetpulse.io.checkpoints.generations import HELD, Generation, Generations, save_generations
from fleetpulse.io.home.desired_state import STOPPED, set_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import raise_floor
from fleetpulse.io.home.services import Service, served
from fleetpulse.io.system.process import write_status
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables import tables
from fleetpulse.reports.backtests.backtest import Backtest
from fleetpulse.reports.backtests.backtest_html import page as backtest_html
from fleetpulse.web.access import User, WebRole
from fleetpulse.web.app import create_app
from fleetpulse.web.pages.operations import shown_text
from tests.support.asgi import Client
from tests.support.homes.homes import take_snapshot

pytestmark = [
    pytest.mark.unit,
    pytest.mark.home(tables=Deployment(1_000, 300_000)),
]
MINUTE_MS = 60_000
PATHS = ("/stream", "/state", "/quality", "/backtest")


@pytest.fixture
def client(home: Home) -> Iterator[Client]:
    app = create_app(home, hosts=("localhost",), authenticate=lambda _: User("ann", WebRole.VIEWER))
    yield Client(app)
    app.state.live.stop()
    app.state.live.stop()


def text_of(client: Client, path: str) -> str:
    answer = client.get(path)
    assert answer.status == 200, answer.text
    assert not re.search(r"<script(?![^>]* src=)|\sstyle=|\son\w+=", answer.text), "inline code is forbidden by the policy"
    return answer.text


def _append(home: Home, table: Any, *rows: dict[str, Any]) -> None:
    tables.append(home, table, tables.to_table(table, rows), "test", 1)


def _batch(batch_id: int, began_at_ms: int, **more: Any) -> dict[str, Any]:
    required = {column.name: 0 for column in STREAM_HEALTH.columns if column.required and column.type in ("long", "int")}
    parts = {
        "latest_offset_ms": 10,
        "get_batch_ms": 5,
        "query_planning_ms": 20,
        "add_batch_ms": 700,
        "wal_commit_ms": 30,
        "commit_offsets_ms": 35,
    }
    return {
        **required,
        **parts,
        "query_id": "q",
        "run_id": "r",
        "generation": 1,
        "batch_id": batch_id,
        "began_at_ms": began_at_ms,
        "batch_ms": 1_000,
        "input_rows": 4_321,
        "rows_late": 2,
        **more,
    }


def test_pages_of_an_empty_home_say_which_kind_of_empty(client: Client) -> None:
    stream, state, quality, backtest = (text_of(client, path) for path in PATHS)
    assert "No process runs" in stream and "No batch yet" in stream and "No refusal by the embedded broker is known." in stream
    assert "No snapshot" in state and "all tables are complete" in state
    assert "No quality run yet" in quality and "No message was quarantined in this range" in quality
    assert "Every message of this range was judged" in quality
    assert "No backtest" in backtest


def test_the_page_of_the_stream_has_the_state_of_each_stream(home: Home, client: Client) -> None:
    assert "The setting <code>streams</code> in settings.toml names the streams that run" in text_of(client, "/stream")
    commits = home.stream_checkpoint(StreamName.VITALS) / "commits"
    commits.mkdir(parents=True)
    (commits / "1204").touch()
    streams = {
        "sessions": {"state": "failed", "batch": 7, "failures": 3, "error": "no <script>"},
        "vitals": {"state": "running", "batch": 1204, "failures": 0, "error": None},
        "commands": {"state": "running", "batch": None, "failures": 0, "error": None},
    }
    write_status(home.run("lifecycle"), {"state": "running", "streams": streams})

    def rows() -> dict[str, str]:
        text = text_of(client, "/stream").partition('id="h-streams"')[2].partition("</section>")[0]
        assert "names the streams that run" not in text
        return dict(re.findall(r'<tr><th scope="row">(\w+)</th>(.*?)</tr>', text, re.DOTALL))

    assert all("stopped</span>" in row for row in rows().values()), "the job does not run"
    with served(home, Service.LIFECYCLE):
        found = rows()
    assert "failed</span>" in found["sessions"] and "no &lt;script&gt;" in found["sessions"] and ">3<" in found["sessions"]
    assert "running</span>" in found["vitals"] and "1,204, ended <time" in found["vitals"]
    assert "<td>-</td>" in found["commands"]


def test_batches_are_bars_of_their_parts_with_a_table(home: Home, client: Client) -> None:
    now_ms = wall_clock_ms()
    begun = [now_ms - 60 * MINUTE_MS, now_ms - 60 * MINUTE_MS + 1, now_ms - 300 * 60 * MINUTE_MS]
    _append(home, STREAM_HEALTH, *(_batch(number, at_ms) for number, at_ms in enumerate(begun)))
    text = text_of(client, "/stream")
    rows = re.findall(r"<tr><th scope=\"row\"><time.*?</tr>", text.partition('id="batches"')[2], re.DOTALL)
    assert sum(int(re.findall(r'class="num">(\d+)<', row)[0]) for row in rows) == 2, "the third batch is out of the range"
    assert all(amount in rows[0] for amount in (">15 ms<", ">20 ms<", ">700 ms<", ">65 ms<", ">200 ms<", ">1 s<"))
    assert {f'class="p-{part}"' for part in range(5)} <= set(re.findall(r'class="p-\d"', text))
    for threshold in THRESHOLDS:
        assert f'<th scope="row">{threshold.metric}</th>' in text
    assert "critical above" in text
    assert "No batch in this range" in text_of(client, "/stream?last=1")


def test_ratings_show_word_and_threshold(home: Home, client: Client) -> None:
    _append(home, STREAM_HEALTH, _batch(1, wall_clock_ms(), checkpoint_ms=31_000, clean_up_ms=6_000))
    text = text_of(client, "/stream")
    assert re.search(r"checkpoint</th><td><span class=\"rating r-critical\">.*?critical</span></td><td class=\"num\">31 s<", text)
    assert re.search(r"clean-up</th><td><span class=\"rating r-warning\">", text)
    assert re.search(r"state update</th><td><span class=\"quiet\">not measured</span>", text)


def test_gaps_are_listed_by_bridge_and_open_ones_as_open(home: Home, client: Client) -> None:
    now_ms = wall_clock_ms()
    home.divide({"north": ["n"], "south": ["s"]})
    spans = [
        ("north", "open", 50, "broker"),
        ("north", "close", 40, None),
        ("north", "open", 20, "network"),
        ("north", "open", 19, "network"),
        ("south", "open", 60 * 24 * 9, "disk"),
        ("south", "close", 60 * 24 * 8, None),
    ]
    rows = [
        {
            "origin": "bridge",
            "segment": 1,
            "bridge": bridge,
            "op": op,
            "why": why,
            "at_ms": now_ms - ago * MINUTE_MS,
            "received_at_ms": now_ms - ago * MINUTE_MS,
        }
        for bridge, op, ago, why in spans
    ]
    _append(home, COVERAGE, *rows)
    table = text_of(client, "/stream?last=1").partition('id="gap-table"')[2]
    listed = re.findall(r"<tr><th scope=\"row\"><bdi>(\w+)</bdi></th>(.*?)</tr>", table)
    assert [bridge for bridge, _ in listed] == ["north", "north", "south"]
    assert "broker" in listed[0][1] and "open" not in listed[0][1]
    assert "network" in listed[1][1] and "<td>open</td>" in listed[1][1]
    assert "no gap in this range" in listed[2][1]


def test_desired_state_names_who_set_it(home: Home, client: Client) -> None:
    set_desired(home, STOPPED, "ann & <b>bob</b>")
    text = text_of(client, "/stream")
    assert "stopped, set by ann &amp; &lt;b&gt;bob&lt;/b&gt;" in text


@pytest.mark.parametrize("path", ["/stream?last=5", "/stream?last=-1", "/quality?last=x", "/quality?last=1e3"])
def test_another_range_is_refused(client: Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status == 400
    assert "1, 6, 24, 168" in answer.text


def test_state_lists_generations_with_gate_switch_and_rollback(home: Home, client: Client) -> None:
    first = Generation(1, 8, 4, "up", status="retired", position={"retired_at_ms": 1_700_000_000_000, "batch": 1_204})
    second = Generation(
        2,
        8,
        5,
        "migrate",
        {"generation": 1, "batch": 1_204},
        1_699_999_000_000,
        "retired",
        {"retired_at_ms": 1_700_000_500_000, "batch": 1_300},
        "ann, fleet_migrate run",
    )
    third = Generation(3, 8, 4, "rollback", {"generation": 1, "batch": 1_204}, 1_700_000_400_000)
    held = replace(second, number=4, status=HELD, position={}, asked_by="<i>eve</i>")
    home.lifecycle.mkdir(parents=True, exist_ok=True)
    save_generations(home.lifecycle, Generations(3, {one.number: one for one in (first, second, third, held)}))
    _append(
        home,
        QUALITY_RESULTS,
        _result("run-1", "state", "numbered", "passed", subject="generation 2"),
        _result("run-1", "state", "unique", "failed", subject="generation 2", severity="warning"),
        _result("run-2", "state", "numbered", "failed", subject="generation 4"),
    )
    text = text_of(client, "/state")
    rows = dict(re.findall(r'<th scope="row" class="num">(\d)</th>(.*?)</tr>', text, re.DOTALL))
    assert list(rows) == ["4", "3", "2", "1"]
    assert "rolled back to generation 1, batch 1204" in rows["3"] and "2023-11-14T22:21:40" in rows["3"]
    assert "passed</span>" in rows["2"] and "1 passed, 1 failed, 0 skipped" in rows["2"] and "fleet_migrate run" in rows["2"]
    assert "2023-11-14T22:13:20" in rows["2"], "it became current when generation 1 stopped"
    assert "failed</span>" in rows["4"] and "&lt;i&gt;eve" in rows["4"]
    assert "batch 1,204" in rows["1"]


def test_state_lists_snapshots_and_floors(home: Home, client: Client) -> None:
    take_snapshot(home, batch=17, devices=1_234, amended_ms=1_700_000_000_000, unmet=["a", "b"])
    take_snapshot(home, form=99)
    raise_floor(home, JUDGEMENTS.name, 1_700_000_000_000)
    text = text_of(client, "/state")
    assert "1,234" in text and "without 2 devices" in text
    assert "its metadata has format version 99" in text
    assert re.search(r"<th scope=\"row\">judgements</th><td><time datetime=\"2023-11-14T22:13:20", text)


def _result(run: str, suite: str, expectation: str, outcome: str, **more: Any) -> dict[str, Any]:
    return {
        "run_id": run,
        "began_at_ms": 1_700_000_000_000,
        "subject": "tables",
        "suite": suite,
        "expectation": expectation,
        "severity": "critical",
        "outcome": outcome,
        "rows": 100,
        "failed": 7 if outcome == "failed" else 0,
        **more,
    }


def test_quality_is_a_grid_whose_cells_open_their_rows(home: Home, client: Client) -> None:
    _append(
        home,
        QUALITY_RESULTS,
        _result("run-1", "coverage", "paired", "passed"),
        _result("run-1", "transitions", "numbered", "failed"),
        _result("run-1", "transitions", "known", "passed"),
        _result("run-1", "clocks", "near", "failed", severity="warning"),
        _result("run-2", "coverage", "paired", "skipped", why="<b>no rows</b>"),
    )
    failed = {
        "run_id": "run-1",
        "began_at_ms": 1,
        "suite": "transitions",
        "expectation": "numbered",
        "severity": "critical",
        "row_key": json.dumps({"device_id": "plant:<x>/1", "life": 3}),
        "detail": json.dumps({"no": "<script>"}),
    }
    _append(home, QUALITY_FAILURES, failed)
    text = text_of(client, "/quality")
    rows = dict(re.findall(r'<tr><th scope="row">(\w+)</th>(.*?)</tr>', text, re.DOTALL))
    assert re.search(r"failed</span> <span class=\"figure\">1/2</span> <span class=\"quiet\">7 rows", rows["transitions"])
    assert "warning</span>" in rows["clocks"]
    assert [one in rows["coverage"] for one in ("skipped</span>", "passed</span>")] == [True, True]
    assert rows["coverage"].index("skipped</span>") < rows["coverage"].index("passed</span>"), "the newest run is first"
    address = re.findall(r'href="(/quality\?run=run-1&amp;suite=transitions)#h-chosen"', rows["transitions"])[0]
    opened = text_of(client, address.replace("&amp;", "&"))
    assert 'href="/devices/plant%3A%3Cx%3E%2F1"' in opened and "life 3" in opened and "no &lt;script&gt;" in opened
    assert "&lt;b&gt;no rows" in text_of(client, "/quality?run=run-2&suite=coverage")
    assert "No such run" in text_of(client, "/quality?run=none&suite=coverage")


def test_quarantine_counts_floods_and_escapes_payloads(home: Home, client: Client) -> None:
    now_ms = wall_clock_ms()
    refused = {"origin": "mqtt", "bridge": "b", "segment": 1, "received_at_ms": now_ms, "topic": "fleet/<i>", "detail": "d"}
    rows = [
        {**refused, "reason": "json", "payload": b"<script>alert(1)</script>\x1b\x00\xe2\x80\xae", "place": 1, "messages": 41},
        {**refused, "reason": "json", "payload": b"x", "place": 2},
        {**refused, "reason": "topic", "payload": None, "place": 3},
    ]
    _append(home, QUARANTINE, *rows)
    late = {"kind": "late", "device_id": "d", "received_at_ms": now_ms, "event_time_ms": 1, "messages": 5}
    _append(home, JUDGEMENTS, late, {**late, "kind": "duplicate", "messages": None}, {**late, "kind": "summary"})
    text = text_of(client, "/quality?last=1")
    assert '<th scope="row">json</th><td class="num">42</td>' in text
    assert '<th scope="row">topic</th><td class="num">1</td>' in text
    assert '<th scope="row">late</th><td class="num">5</td>' in text
    assert '<th scope="row">duplicate</th><td class="num">1</td>' in text
    assert ">summary<" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b\\x00\\u202e" in text and "fleet/&lt;i&gt;" in text


def test_rare_reasons_share_a_part_of_the_chart(home: Home, client: Client) -> None:
    now_ms = wall_clock_ms()
    rows = [
        {
            "origin": "mqtt",
            "bridge": "b",
            "segment": 1,
            "received_at_ms": now_ms,
            "topic": "t",
            "detail": "d",
            "place": number,
            "reason": f"reason-{number}",
            "messages": 100 - number,
        }
        for number in range(9)
    ]
    _append(home, QUARANTINE, *rows)
    text = text_of(client, "/quality")
    assert "<bdi>others</bdi>" in text and "<bdi>reason-6</bdi>" not in text and "<bdi>reason-5</bdi>" in text
    assert '<th scope="row">reason-8</th><td class="num">92</td>' in text


def test_a_payload_is_cut_and_its_control_characters_are_escaped() -> None:
    assert shown_text("a\nb\u202ec") == "a\nb\\u202ec"
    assert shown_text("x" * 1_000) == "x" * 400 + "…"


def _backtest(home: Home, name: str, page: str | None) -> Path:
    folder = home.path / "airflow" / "fleet" / "backtests" / name
    folder.mkdir(parents=True)
    if page is not None:
        (folder / "report.html").write_text(page)
    return folder


def test_backtests_have_their_figures_and_open_in_a_sandbox(home: Home, client: Client) -> None:
    days = [{"day": "2023-11-14", "before": 1_500, "after": 1_200}]
    figures = Backtest(
        'v"<1>',
        1_699_000_000_000,
        1_700_000_000_000,
        98_765,
        {"added": 3, "gone": 303, "moved": 12},
        -90_000.0,
        [],
        [],
        [],
        days,
        [],
    )
    _backtest(home, "manual-1-abc", backtest_html(figures))
    _backtest(home, "manual-2-old", "<!doctype html><title>old</title>")
    _backtest(home, "manual-3-failed", None)
    (home.path / "airflow" / "fleet" / "secret").write_text("not here")
    (home.path / "airflow" / "fleet" / "backtests" / "linked").symlink_to(home.path)
    text = text_of(client, "/backtest")
    for part in ("v&#34;&lt;1&gt;", "98,765", "1,500", "1,200", ">303<", ">12<", "1 min earlier"):
        assert part in text
    assert "of an older version" in text and "the backtest runs, or it failed" in text
    assert "linked" not in text
    answer = client.get("/backtest/manual-1-abc")
    assert answer.status == 200 and answer.text == backtest_html(figures)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox;") and "allow-scripts" not in policy and "default-src 'none'" in policy
    for name in ("manual-3-failed", "none", "..", "%2e%2e", "linked", "%2e%2e%2fsecret"):
        assert client.get(f"/backtest/{name}").status == 404, name


def test_figures_of_a_damaged_page_are_left_out(home: Home, client: Client) -> None:
    for number, content in enumerate(("{", "[1]", json.dumps({"rows": "<b>", "policy_version": "p" * 500}))):
        _backtest(home, f"page-{number}", f"<meta name=\"fleetpulse-backtest\" content='{content}'>")
    text = text_of(client, "/backtest")
    assert "<b>" not in text.partition('id="h-backtests"')[2].partition("</table>")[0]
    assert f">{'p' * 64}<" in text and "p" * 65 not in text


def test_a_mounted_application_loads_its_facts_on_the_first_request(home: Home) -> None:
    app = create_app(home, hosts=("localhost",), authenticate=lambda _: User("ann", WebRole.VIEWER))
    live = app.state.live
    assert live.reached_tag() == "", "nothing is read before a request, without a start"
    assert Client(app).get("/stream").status == 200
    assert live.reached_tag() != ""
    live.start()  # once more: no effect
    live.stop()


def test_without_airflow_every_action_is_a_command_for_this_home(home: Home, client: Client) -> None:
    for path, words in (("/state", "state snapshot"), ("/quality", "quality run"), ("/backtest", "backtest --policy")):
        text = text_of(client, path)
        assert "<form data-dag" not in text and "actions.js" not in text
        shown = re.sub(r"<[^>]+>", "", text)
        assert f"./fleet {words}" in shown and str(home.path) in shown
    assert "state rescale --key-groups" in re.sub(r"<[^>]+>", "", text_of(client, "/state"))
