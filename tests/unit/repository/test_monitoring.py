"""Example files for Prometheus and Grafana: names of metrics, queries, alerts and their runbooks.

No maintained parser of PromQL is installed. `faults_of` checks names, labels and brackets of a query, not its types.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from cli.dev.docgen import metrics as metrics_page
from fleetpulse.paths import ROOT
from fleetpulse.web.metric_table import METRICS, MetricKind

pytestmark = pytest.mark.unit
PROMETHEUS = ROOT / "infra/prometheus"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((PROMETHEUS / "fleetpulse-rules.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
DASHBOARD: dict[str, Any] = json.loads((ROOT / "infra/grafana/fleetpulse.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
LABELS = {
    sample: {*metric.labels} | ({"le"} if sample.endswith("_bucket") else set())
    for metric in METRICS
    for sample in metric.samples
}
COUNTERS = {sample for metric in METRICS if metric.kind is not MetricKind.GAUGE for sample in metric.samples}
OF_TARGETS = {"job", "instance"}
FUNCTIONS = {"sum", "rate", "topk", "time", "histogram_quantile", "by", "without", "offset", "or"}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|without)\s*\(([^()]*)\)")
_SELECTED = re.compile(r"([a-zA-Z_:][\w:]*)?\{([^{}]*)\}")
_DURATION = re.compile(r"\[(?:\d+[smhd]|\$__rate_interval)\]|\b\d+[smhd]\b")
_NAME = re.compile(r"[a-zA-Z_:][\w:]*")
_OPENING = {")": "(", "]": "[", "}": "{"}


def _bracket_fault(query: str) -> str | None:
    opened = list[str]()
    for sign in _STRING.sub('""', query):
        if sign in "([{":
            opened.append(sign)
        elif sign in _OPENING and (not opened or opened.pop() != _OPENING[sign]):
            return f"{sign} closes nothing"
    return f"{opened[-1]} is not closed" if opened else None


def faults_of(query: str) -> Iterator[str]:
    """Yield the faults of a query in PromQL: brackets, unknown names, unknown labels, counters without a rate."""
    if fault := _bracket_fault(query):
        yield fault
    bare = _STRING.sub('""', query)
    known = {"up": set[str](), **{name: set[str]() for name in RECORDED}, **LABELS}
    for name, matchers in _SELECTED.findall(bare):
        for label in _NAME.findall(matchers.replace('""', "")):
            if label not in known.get(name, set()) | OF_TARGETS:
                yield f"{name} has no label {label}"
    rest = _DURATION.sub("", _SELECTED.sub(lambda found: found[1] or "", bare))
    named = [name for name in _NAME.findall(_GROUPING.sub("", rest)) if name not in FUNCTIONS]
    if not named:
        yield "no metric is named"
    yield from (f"unknown name {name}" for name in named if name not in known)
    grouped = {label.strip() for labels in _GROUPING.findall(bare) for label in labels.split(",")}
    carried = OF_TARGETS.union(*(known[name] for name in named if name in known))
    yield from (f"no metric of the query has the label {label}" for label in grouped if label not in carried)
    for name in COUNTERS & {*named}:
        if len(re.findall(rf"\b{name}\b", rest)) != len(re.findall(rf"\brate\(\s*{name}\b", rest)):
            yield f"{name} is a counter; use its rate"


def _queries() -> Iterator[tuple[str, str]]:
    for rule in RULES:
        yield rule.get("alert", rule.get("record", "")), rule["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]


@pytest.mark.parametrize(("name", "query"), list(_queries()))
def test_a_query_names_metrics_and_labels_that_exist(name: str, query: str) -> None:
    assert list(faults_of(query)) == []


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sum(fleetpulse_devices", "( is not closed"),
        ("fleetpulse_devices)", ") closes nothing"),
        ('fleetpulse_devices{mode="("}[5m', "[ is not closed"),
        ("fleetpulse_nothing > 1", "unknown name fleetpulse_nothing"),
        ('fleetpulse_devices{site="x"}', "fleetpulse_devices has no label site"),
        ("sum by (class) (fleetpulse_devices)", "no metric of the query has the label class"),
        ("sum(fleetpulse_quarantined_total) > 3", "fleetpulse_quarantined_total is a counter; use its rate"),
        ("fleetpulse_transitions", "unknown name fleetpulse_transitions"),
        ("time() > 3", "no metric is named"),
    ],
)
def test_a_faulty_query_is_found(query: str, fault: str) -> None:
    assert fault in list(faults_of(query))


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_waits_has_a_severity_and_a_runbook(alert: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d+m", alert["for"])
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert set(alert["annotations"]) == {"summary", "runbook"}
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ +(.+?) *$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    summary = alert["annotations"]["summary"]
    carried = OF_TARGETS.union(*(LABELS.get(name, set()) for name in _NAME.findall(alert["expr"])))
    assert {*re.findall(r"\$labels\.(\w+)", summary)} <= carried and "{{ $labels.instance }}" in summary


def test_the_guide_names_every_alert() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert len({*names}) == len(names) > 8
    guide = (ROOT / "docs/how-to/monitor.md").read_text()
    assert [name for name in names if f"`{name}`" not in guide] == []


def test_the_scrape_configuration_reads_a_token_from_a_file_and_the_rules() -> None:
    configuration = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    [scrape] = configuration["scrape_configs"]
    assert (scrape["job_name"], scrape["metrics_path"]) == ("fleetpulse", "/metrics")
    assert set(scrape["authorization"]) == {"type", "credentials_file"} and scrape["authorization"]["type"] == "Bearer"
    assert all((PROMETHEUS / name).exists() for name in configuration["rule_files"])
    assert scrape["static_configs"] == [{"targets": ["127.0.0.1:8090"]}]


def test_panels_have_titles_descriptions_and_places_of_their_own() -> None:
    titles = [panel["title"] for panel in PANELS]
    assert len({*titles}) == len(titles) > 15
    assert all(panel["description"].endswith(".") for panel in PANELS)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken = set[tuple[int, int]]()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells


def test_the_dashboard_names_no_data_source_of_a_certain_installation() -> None:
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}
    assert [one["name"] for one in DASHBOARD["templating"]["list"]] == ["datasource", "instance"]
    assert DASHBOARD.get("id") is None


def test_the_reference_lists_every_sample() -> None:
    page = metrics_page()
    assert [sample for sample in LABELS if f"`{sample}`" not in page] == []
