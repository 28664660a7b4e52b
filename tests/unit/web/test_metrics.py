"""Metrics: the values of `fleet status`, bounded labels, formats, and parts that cannot be read."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.applications import Starlette

from cli.commands.inspect.status import status_facts
from fleetpulse.core.judgements import AMENDMENTS
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.tables import COVERAGE, JUDGEMENTS, MESSAGES
from fleetpulse.core.times import DAY_MS
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import Service, served
from fleetpulse.io.system.process import write_status
from fleetpulse.io.tables import tables
from fleetpulse.web.access import User, WebRole
from fleetpulse.web.app import create_app
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.metric_table import METRICS, MOST_SITES, OTHER, MetricKind
from fleetpulse.web.metrics import BUCKETS_S, SLOW_S, Requests, label_text
from tests.support.asgi import Client
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.homes import apply_retention
from tests.support.homes.served import ServedHome, at_site, small_fleet

pytestmark = pytest.mark.unit
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
Values = dict[str, dict[tuple[tuple[str, str], ...], float]]
DAY_S = DAY_MS // 1_000
Serve = Callable[[Home], Starlette]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts the application of a home, without a login."""
    started = list[LiveFleet]()

    def start(home: Home) -> Starlette:
        app = create_app(home, hosts=("localhost",), authenticate=lambda _: User("scraper", WebRole.API_READER))
        app.state.live.start()
        started.append(app.state.live)
        return app

    yield start
    for live in started:
        live.stop()


def scraped(app: Starlette) -> Values:
    """Return the values of a scrape by sample and labels."""
    answer = Client(app).get("/metrics", {"Accept": OPENMETRICS})
    assert answer.status == 200, answer.text
    values: Values = {}
    for family in parse_openmetrics(answer.text):
        for sample in family.samples:
            values.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return values


def by_label(values: Values, name: str) -> dict[str, float]:
    """Return the values of a sample with one label that are not 0, by the value of the label."""
    return {labels[0][1]: value for labels, value in values.get(name, {}).items() if value}


def alone(values: Values, name: str) -> float:
    """Return the value of a sample without labels."""
    [(labels, value)] = values[name].items()
    assert labels == ()
    return value


def read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each scrape read tables with a new version."""
    monkeypatch.setattr("fleetpulse.web.metrics.SLOW_S", 0.0)
    assert SLOW_S > 1


@pytest.mark.parametrize("days", [0, 4])
def test_values_equal_the_facts_of_fleet_status(tmp_path: Path, serve: Serve, days: int) -> None:
    made = small_fleet(tmp_path / "home")
    if days:  # the transitions before are not in memory
        beats = [at_site("south", signal(at, "c")) for at in range(300, days * DAY_S, 90)]
        made.batch(*beats, tick(days * DAY_S))
    made.retract("a", "offline", 2)
    facts, values = status_facts(made.home), scraped(serve(made.home))
    modes = by_label(values, "fleetpulse_devices")
    assert modes.pop("unjudged", 0) == (0 if days else 1), "it is registered for later"
    assert modes == facts["devices"] != {}
    assert alone(values, "fleetpulse_devices_never_seen") == facts["never_seen"] == (0 if days else 1)
    assert by_label(values, "fleetpulse_devices_wrong_clock") == facts["clocks"] != {}
    retracted = by_label(values, "fleetpulse_transitions_retracted_total")
    emitted = by_label(values, "fleetpulse_transitions_total")
    assert retracted == {"offline": 1}
    net = {mode: count - retracted.get(mode, 0) for mode, count in emitted.items()}
    assert {mode: count for mode, count in net.items() if count} == facts["transitions"]
    assert by_label(values, "fleetpulse_judgements_total") == facts["judgements"] | facts["amended"]
    assert set(facts["amended"]) <= set(AMENDMENTS)
    assert by_label(values, "fleetpulse_quarantined_total") == facts["quarantine"] == {"json": 1, "flood": 40}
    assert alone(values, "fleetpulse_messages_stored") == alone(values, "fleetpulse_messages_landed_total") == facts["messages"]
    assert alone(values, "fleetpulse_newest_received_timestamp_seconds") == facts["newest_received_at_ms"] / 1000
    assert alone(values, "fleetpulse_frontier_timestamp_seconds") == facts["frontier_ms"] / 1000
    assert alone(values, "fleetpulse_frontier_lag_seconds") > 1e7, "the rows are years old"
    assert set(by_label(values, "fleetpulse_part_failed")) == set()


def test_every_declared_metric_is_answered_and_no_other(tmp_path: Path, serve: Serve) -> None:
    made = small_fleet(tmp_path / "home")
    made.ran_batch(7, batch_ms=900)
    app = serve(made.home)
    Client(app).get("/healthz")
    families = {family.name: family for family in parse_openmetrics(Client(app).get("/metrics", {"Accept": OPENMETRICS}).text)}
    assert list(families) == [metric.name for metric in METRICS]
    for metric in METRICS:
        found = families[metric.name]
        assert (found.type, found.unit, found.documentation) == (metric.kind.value, metric.unit, metric.meaning)
        assert {sample.name for sample in found.samples} <= set(metric.samples)
        assert all(set(sample.labels) - {"le"} == set(metric.labels) for sample in found.samples)


def test_names_follow_the_rules_of_prometheus() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("fleetpulse_")
        assert not metric.name.endswith(("_total", "_ms", "_count", "_sum", "_bucket", "_info", "_created"))
        assert metric.name.endswith(f"_{metric.unit}") or not metric.unit
        assert metric.unit in ("", "seconds", "bytes")
        assert metric.kind is not MetricKind.COUNTER or "since" in metric.meaning, "the meaning of a counter has its beginning"
        assert "\n" not in metric.meaning and not metric.meaning.endswith(".")


@pytest.mark.parametrize(
    ("accept", "is_openmetrics"),
    [
        (OPENMETRICS, True),
        ("text/plain;q=0.5, Application/OpenMetrics-Text ; version=1.0.0 ; q=0.6", True),
        ("application/openmetrics-text;q=0, text/plain", False),
        ("application/openmetrics-text;q=0.000, text/plain", False),
        ("application/openmetrics-text;q=0.001", True),
        ("text/plain;version=0.0.4", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_the_format_is_the_one_that_the_client_accepts(
    tmp_path: Path,
    serve: Serve,
    accept: str,
    is_openmetrics: bool,
) -> None:
    answer = Client(serve(ServedHome(tmp_path / "home").home)).get("/metrics", {"Accept": accept})
    media_type = "application/openmetrics-text; version=1.0.0" if is_openmetrics else "text/plain; version=0.0.4"
    assert answer.headers["content-type"] == f"{media_type}; charset=utf-8"
    assert answer.text.endswith("# EOF\n") == is_openmetrics
    parsed = parse_openmetrics(answer.text) if is_openmetrics else parse_text(answer.text)
    assert {"fleetpulse_devices", "fleetpulse_sites"} <= {family.name for family in parsed}


def test_labels_are_bounded_with_a_thousand_sites_and_classes(tmp_path: Path, serve: Serve) -> None:
    made, total = ServedHome(tmp_path / "home"), 1_100
    rows = [at_site(f"site-{number % 1_000:03}", signal(10, f"d{number}")) for number in range(total)]
    made.batch(*rows, tick(40))
    values = scraped(serve(made.home))
    sites = {dict(labels)["site"]: value for labels, value in values["fleetpulse_site_devices"].items()}
    assert len(sites) == MOST_SITES + 1
    assert sum(sites.values()) == total
    assert sites.pop(OTHER) == total - 2 * MOST_SITES
    assert sites == {f"site-{number:03}": 2.0 for number in range(100)}, "the largest have a label of their own"
    assert alone(values, "fleetpulse_sites") == 1_000
    assert sum(values["fleetpulse_class_devices"].values()) == total


def test_a_site_whose_name_is_that_of_the_sum_is_added_to_it(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetpulse.web.metrics.MOST_SITES", 2)
    made = ServedHome(tmp_path / "home")
    sites = {OTHER: 3, "big": 2, "small": 1}
    made.batch(*(at_site(site, signal(10, f"{site}{n}")) for site, count in sites.items() for n in range(count)), tick(40))
    found = scraped(serve(made.home))["fleetpulse_site_devices"]
    assert {dict(labels)["site"]: value for labels, value in found.items()} == {"big": 2, OTHER: 4}


HOSTILE = ['quo"te', "line\nfeed", "back\\slash", "\u202eright to left", 'x"} 1\nfleetpulse_devices{mode="online', "\u2028\r\x00"]


def test_hostile_names_of_sites_are_escaped(tmp_path: Path, serve: Serve) -> None:
    made = ServedHome(tmp_path / "home")
    made.batch(*(at_site(site, signal(10, f"d{number}")) for number, site in enumerate(HOSTILE)), tick(40))
    app = serve(made.home)
    values = scraped(app)
    sites = {dict(labels)["site"] for labels in values["fleetpulse_site_devices"]}
    assert sites == set(map(label_text, HOSTILE)) and len(sites) == len(HOSTILE)
    assert "\\u202eright to left" in sites and 'quo"te' in sites and "back\\slash" in sites
    assert by_label(values, "fleetpulse_devices") == {"online": len(HOSTILE)}
    text = Client(app).get("/metrics").text
    assert not any(sign in text for sign in ("\u202e", "\u2028", "\r", "\x00"))
    assert 'site="quo\\"te"' in text
    assert {family.name for family in parse_text(text)} >= {"fleetpulse_sites"}


@pytest.mark.parametrize("name", ["Zürich", "מפעל", "工場 3", "plain"])
def test_names_in_any_script_stay_as_they_are(name: str) -> None:
    assert label_text(name) == name


def test_retractions_and_retention_decrease_no_counter(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    read_anew(monkeypatch)
    made = small_fleet(tmp_path / "home")
    made.batch(at_site("north", signal(4 * DAY_S, "a")), tick(4 * DAY_S + 40))
    app = serve(made.home)
    before = scraped(app)
    made.retract("a", "offline", 2)
    apply_retention(made.home, tables.version(made.home.table(MESSAGES.name)), DAY_MS)
    app.state.live.mirror.refresh(1)
    after = scraped(app)
    assert alone(after, "fleetpulse_messages_stored") < alone(before, "fleetpulse_messages_stored")
    assert by_label(after, "fleetpulse_transitions_retracted_total") == {"offline": 1}
    for metric in METRICS:
        if metric.kind is MetricKind.COUNTER and not metric.name.startswith("fleetpulse_http"):
            [name] = metric.samples
            assert all(after[name][labels] >= value for labels, value in before[name].items()), name
    assert after["fleetpulse_transitions_total"] == before["fleetpulse_transitions_total"]


def test_the_newest_batch_is_shown_in_base_units(tmp_path: Path, serve: Serve) -> None:
    made = ServedHome(tmp_path / "home")
    made.ran_batch(
        8, batch_ms=1_500, add_batch_ms=1_200, checkpoint_ms=40, input_rows=300, processed_rows_per_s=200.0, generation=2
    )
    parts = {"batch_ms": 2_500, "add_batch_ms": 2_250, "wal_commit_ms": 50}
    made.ran_batch(9, **parts, checkpoint_ms=80, state_update_us=30, state_bytes=7_000, generation=2)
    values = scraped(serve(made.home))
    seconds = {"batch_duration": 2.5, "checkpoint_duration": 0.08, "state_update": 0.000_03}
    assert {name: alone(values, f"fleetpulse_{name}_seconds") for name in seconds} == seconds
    assert by_label(values, "fleetpulse_batch_part_duration_seconds") == {"add_batch": 2.25, "wal_commit": 0.05}
    assert alone(values, "fleetpulse_batch_number") == 9
    assert alone(values, "fleetpulse_generation") == 2
    assert alone(values, "fleetpulse_state_bytes") == 7_000
    assert alone(values, "fleetpulse_batch_started_timestamp_seconds") == (START + 9) / 1000
    assert "fleetpulse_batch_input_rows" not in values, "a batch without a measurement has no sample"


def test_streams_are_shown_as_the_job_reports_them(tmp_path: Path, serve: Serve) -> None:
    home = small_fleet(tmp_path / "home").home
    commits = home.stream_checkpoint(StreamName.COMMANDS) / "commits"
    commits.mkdir(parents=True)
    (commits / "6").touch()
    os.utime(commits / "6", (1_700_000_000.5, 1_700_000_000.5))
    failed = {"state": "failed", "batch": None, "failures": 3, "error": "<b>"}
    running = {"state": "running", "batch": 6, "failures": 1, "error": None}
    app = serve(home)
    assert "fleetpulse_stream_running" not in scraped(app), "no stream is on"
    write_status(home.run("lifecycle"), {"state": "running", "streams": {"sessions": failed, "commands": running}})
    assert set(scraped(app)["fleetpulse_stream_running"].values()) == {0}, "the job does not run"
    with served(home, Service.LIFECYCLE):
        values = scraped(app)
    assert {labels[0][1]: value for labels, value in values["fleetpulse_stream_running"].items()} == {
        "sessions": 0,
        "commands": 1,
    }
    assert by_label(values, "fleetpulse_stream_failures") == {"sessions": 3, "commands": 1}
    assert by_label(values, "fleetpulse_stream_batch_number") == {"commands": 6}
    assert by_label(values, "fleetpulse_stream_batch_timestamp_seconds") == {"commands": 1_700_000_000.5}


def test_processes_and_bridges_are_shown_as_they_run(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    read_anew(monkeypatch)
    made = small_fleet(tmp_path / "home")
    made.home.divide({"north": ["north"]})
    made.gap("bridge-1", "open", 10)
    made.gap("bridge-1", "close", 20)
    made.gap("north", "open", 30)
    write_status(made.home.run("bridge"), {"state": "live", "subscribed": True, "gap_open": False})
    write_status(made.home.run("bridge-north"), {"state": "waiting", "subscribed": False, "gap_open": False})
    write_status(made.home.run("lifecycle"), {"state": "given up"})
    app = serve(made.home)
    stopped = scraped(app)
    assert by_label(stopped, "fleetpulse_process_running") == {}
    assert by_label(stopped, "fleetpulse_bridge_listening") == {}
    assert by_label(stopped, "fleetpulse_bridge_gap_open") == {"north": 1}
    with served(made.home, Service.BRIDGE), served(made.home, Service.LIFECYCLE):
        values = scraped(app)
        assert by_label(values, "fleetpulse_process_running") == {"bridge": 1, "bridge-north": 1}
        assert set(status_facts(made.home)["processes"]) == {"bridge", "bridge-north", "lifecycle"}
    assert by_label(values, "fleetpulse_bridge_listening") == {"bridge-1": 1}
    assert values["fleetpulse_bridge_listening"][("bridge", "north"),] == 0
    assert set(by_label(values, "fleetpulse_process_status_age_seconds")) <= {"bridge", "bridge-north"}
    made.gap("north", "close", 40)
    assert by_label(scraped(app), "fleetpulse_bridge_gap_open") == {}


def test_requests_are_counted_by_template_of_the_route_and_status(tmp_path: Path) -> None:
    app = create_app(ServedHome(tmp_path / "home").home, hosts=("localhost",), authenticate=lambda _: None)
    secret = "/api/v1/devices.csv?q=secret"
    for path in ("/healthz", "/healthz", "/login?key=x", secret, "/nothing/secret"):
        Client(app).get(path)
    Client(app).get("/healthz", {"Host": "elsewhere"})
    requests: Requests = app.state.metrics.requests
    assert requests.counts() == {
        ("/healthz", "200"): 2, ("/login", "401"): 1, (OTHER, "401"): 2, (OTHER, "421"): 1,
    }  # fmt: skip
    buckets, seconds = requests.durations()["/healthz"]
    assert [end for end, _ in buckets] == [*map(str, BUCKETS_S), "+Inf"]
    assert buckets[-1][1] == 2 and seconds > 0


def test_a_duration_counts_in_all_buckets_that_end_at_it_or_later() -> None:
    requests = Requests()
    for seconds in (0.2, 0.201, 99.0):
        requests.add("/x", 200, seconds)
    buckets, total = requests.durations()["/x"]
    assert dict(buckets) == {"0.005": 0, "0.01": 0, "0.025": 0, "0.05": 0, "0.1": 0, "0.2": 1, "0.5": 2, "1.0": 2, "2.5": 2,
                             "10.0": 2, "+Inf": 3}  # fmt: skip
    assert total == pytest.approx(99.401)


def test_a_failure_of_a_route_is_counted_with_status_500(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    app = serve(ServedHome(tmp_path / "home").home)
    monkeypatch.setattr(app.state.metrics, "exposition", None)
    assert Client(app).get("/metrics").status == 500
    assert app.state.metrics.requests.counts() == {("/metrics", "500"): 1}


def test_a_part_that_cannot_be_read_is_left_out(tmp_path: Path, serve: Serve) -> None:
    made = small_fleet(tmp_path / "home")
    app = serve(made.home)
    app.state.live.reached()
    (made.home.table(COVERAGE.name) / "_delta_log" / f"{0:020d}.json").write_text("damaged")
    values = scraped(app)
    assert by_label(values, "fleetpulse_part_failed") == {"processes": 1}
    assert "fleetpulse_process_running" not in values
    assert by_label(values, "fleetpulse_devices")["online"] > 0


def test_a_fleet_that_cannot_be_read_is_reported(tmp_path: Path, serve: Serve) -> None:
    made = small_fleet(tmp_path / "home")
    (made.home.table(JUDGEMENTS.name) / "_delta_log" / f"{0:020d}.json").write_text("damaged")
    values = scraped(serve(made.home))
    assert by_label(values, "fleetpulse_part_failed")["fleet"] == 1
    assert alone(values, "fleetpulse_refresh_failing") == 1
    assert alone(values, "fleetpulse_refresh_age_seconds") == float("inf")
    assert "fleetpulse_devices" not in values


def test_a_home_without_tables_is_a_fleet_without_devices(tmp_path: Path, serve: Serve) -> None:
    home = Home(tmp_path / "home")
    home.prepare(None)
    values = scraped(serve(home))
    assert by_label(values, "fleetpulse_part_failed") == {}
    assert set(values["fleetpulse_devices"].values()) == {0}
    assert alone(values, "fleetpulse_messages_landed_total") == 0
    assert "fleetpulse_frontier_lag_seconds" not in values and "fleetpulse_batch_number" not in values


def test_devices_are_counted_again_only_if_the_facts_differ(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small_fleet(tmp_path / "home")
    app = serve(made.home)
    readings = itertools.count()
    reading = LiveFleet.reading
    monkeypatch.setattr(LiveFleet, "reading", lambda live: next(readings) is not None and reading(live))
    first, mirror = scraped(app), app.state.live.mirror
    assert not mirror.refresh(mirror.loaded_ms + 1_000), "nothing is new"
    assert scraped(app)["fleetpulse_devices"] == first["fleetpulse_devices"]
    assert next(readings) == 1, "two scrapes, and one count"
    made.batch(at_site("north", signal(300, "new")), tick(340))
    mirror.refresh(1)
    assert by_label(scraped(app), "fleetpulse_devices") != by_label(first, "fleetpulse_devices")


def test_a_scrape_does_not_keep_the_refresh_going(tmp_path: Path, serve: Serve) -> None:
    app = serve(ServedHome(tmp_path / "home").home)
    scraped(app)
    assert not app.state.live._is_wanted()
    app.state.live.reached()
    assert app.state.live._is_wanted()


def test_metrics_need_a_token(tmp_path: Path) -> None:
    made = ServedHome(tmp_path / "home")
    app = create_app(made.home, hosts=("localhost",))
    assert Client(app).get("/metrics").status == 401
