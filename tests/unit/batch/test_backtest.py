"""Backtest: differences independent of files and slices, refused ranges, and a self-contained page."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from deltalake import DeltaTable

from batch import backtest as job
from batch.backtest import backtest
from cli.commands.batch.backtest import backtest as backtest_command
from fleetpulse.core.errors import Misuse
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.operations.backtests import CHANGES
from fleetpulse.core.policy import Policy, parse_policy
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Kind, Row
from fleetpulse.core.tables import MESSAGES
from fleetpulse.core.times import DAY_MS, format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.bronze_slices import pieces_of, slices_of
from fleetpulse.reports.backtests.backtest import Backtest, verdicts
from fleetpulse.reports.backtests.backtest_html import page
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.homes import apply_retention, landed_home
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
DEPLOYMENT = Deployment(10_000, 300_000, 60_000)
SHORT, LONG = (parse_policy({"rules": {"timeout": timeout}}) for timeout in ("30s", "100s"))


def _history() -> list[Row]:
    beats = [signal(at, device) for device, every in (("a", 20), ("b", 50), ("c", 200)) for at in range(0, 1000, every)]
    own = row(0.5, "fleet/_/_/policy", policy=LONG.normalised(), effective_from_s=-3600)
    return sorted([*beats, own, tick(1500)], key=lambda one: one.received_at_ms)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return landed_home(tmp_path / "home", _history(), DEPLOYMENT, (20, 40, 60))


def _files(home: Home) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in home.path.rglob("*")}


def test_shorter_timeout_moves_and_adds_verdicts_without_writing(home: Home) -> None:
    before = _files(home)
    report = backtest(home, SHORT, None, None)
    assert _files(home) == before
    figures = report.figures
    assert [one.kind for one in replay(_history(), DEPLOYMENT)].count(JudgementKind.TRANSITION) == sum(
        mode["before"] for mode in figures.by_mode
    )
    assert figures.changes["moved"] == 7  # c goes offline five times, a and b once at the end; all earlier
    assert figures.changes["added"] == 2 * 19  # b is silent for 50 s after each message
    assert figures.changes["gone"] == 0
    assert figures.moved_by_ms == -70_000
    assert (figures.alerts("before"), figures.alerts("after")) == (7, 26)
    assert sum(1 for _ in verdicts(report.found)) == sum(figures.changes.values())


def test_backtest_of_the_policy_in_force_finds_no_differences(home: Home) -> None:
    figures = backtest(home, LONG, None, None).figures
    assert figures.changes == dict.fromkeys(CHANGES, 0)
    assert figures.alerts("before") == figures.alerts("after") == 7


def test_compaction_and_vacuum_do_not_change_a_backtest(home: Home) -> None:
    expected = backtest(home, SHORT, None, None).figures
    table = DeltaTable(str(home.table(MESSAGES.name)))
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert len(pieces_of(home)) == 1
    assert backtest(home, SHORT, None, None).figures == expected


@pytest.mark.parametrize("max_rows", [1, 7, 30])
def test_slice_size_does_not_change_a_backtest(home: Home, max_rows: int) -> None:
    expected = backtest(home, SHORT, None, None)
    pieces = pieces_of(home, max_rows)
    shuffled = [replace(piece, first_ms=pieces[0].first_ms) for piece in pieces]  # as if all pieces overlapped
    for order in (pieces, sorted(shuffled, key=lambda piece: piece.first_ms)):
        question = job._question(home, SHORT, order, None, None)
        slices = slices_of(order, max_rows)
        assert len(slices) > 1 or order is not pieces
        assert job.replay_here(question, slices).to_bytes() == expected.found.to_bytes()


def test_backtest_finds_no_differences_before_its_start(home: Home) -> None:
    from_ms = START + 500_000
    changed = backtest(home, SHORT, from_ms, None).found.changed.to_pylist()
    assert changed
    assert all((one["before_ms"] or one["after_ms"]) >= from_ms for one in changed)
    bounded = backtest(home, SHORT, from_ms, START + 700_000)
    assert {one["change"] for one in bounded.found.changed.to_pylist()} == {"added", "moved"}
    assert bounded.figures.to_ms == START + 700_000


def test_backtest_of_a_home_without_history_is_refused(tmp_path: Path) -> None:
    empty = Home(tmp_path / "empty")
    empty.prepare(DEPLOYMENT)
    with refused("messages-missing"):
        backtest(empty, SHORT, None, None)
    young = landed_home(tmp_path / "young", [signal(0)], DEPLOYMENT)
    with refused("interval-not-judged"):
        backtest(young, SHORT, None, None)


def test_range_outside_the_history_is_refused_with_the_oldest_instant(home: Home) -> None:
    oldest = format_instant(START)
    for bounds in ((START - 1, None), (None, START - 1), (None, START + 9_000_000), (START + 9_000_000, None)):
        with refused("interval-not-retained", match=f"{oldest} is the oldest instant"):
            backtest(home, SHORT, *bounds)
    with refused("interval-reversed", Misuse):
        backtest(home, SHORT, START + 2, START + 1)
    with refused("interval-not-judged"):
        backtest(home, SHORT, START + 1_495_000, None)  # received, but beyond the frontier


def test_backtest_starts_at_the_retention_floor_and_refuses_earlier_ranges(tmp_path: Path) -> None:
    later = [replace(one, received_at_ms=one.received_at_ms + 2 * DAY_MS) for one in _history() if one.kind is Kind.TICK]
    later += [signal(2 * DAY_MS / 1000 + at, device) for device in ("a", "b") for at in range(0, 1000, 50)]
    later.sort(key=lambda one: one.received_at_ms)
    home = landed_home(tmp_path / "home", [*_history(), *later], DEPLOYMENT, (len(_history()),))
    assert backtest(home, SHORT, None, None).figures.from_ms == START
    kept_ms = apply_retention(home, 2, DAY_MS)
    kept = format_instant(kept_ms)
    for bounds in ((kept_ms - 1, None), (START, None), (None, kept_ms - 1)):
        with refused("rows-not-retained", match=f"a backtest --.* rows are kept since {kept} .*keep_messages"):
            backtest(home, SHORT, *bounds)
    report = backtest(home, SHORT, None, None)
    assert report.figures.from_ms == kept_ms
    assert report.figures.changes["added"] == 2 * 2 * 19, "a and b are silent for 50 s after each message"
    assert report.found.changed == backtest(home, SHORT, kept_ms, None).found.changed
    assert all((one["before_ms"] or one["after_ms"]) >= kept_ms for one in report.found.changed.to_pylist())


def test_missing_or_faulty_policy_file_is_refused(home: Home, tmp_path: Path) -> None:
    with refused("file-unreadable"):
        backtest_command(tmp_path / "none.toml", home.path)
    (tmp_path / "bad.toml").write_text('[rules]\ntimeout = "-5m"\n')
    with refused("policy-faulty"):
        backtest_command(tmp_path / "bad.toml", home.path)
    with refused("home-missing"):
        backtest_command(tmp_path / "bad.toml", tmp_path / "nowhere")


class _Reader(HTMLParser):
    """Parser that collects the text, the tags and the loaded resources of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: set[str] = set()
        self.loads: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [one for one in attrs if one[0] in ("src", "href", "xlink:href", "srcset", "data", "action")]

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())


def _read(figures: Backtest) -> _Reader:
    reader = _Reader()
    reader.feed(page(figures))
    return reader


def test_page_shows_every_figure_and_loads_nothing(home: Home) -> None:
    figures = backtest(home, SHORT, None, None).figures
    reader = _read(figures)
    assert not reader.loads
    assert not reader.tags & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "foreignobject"}
    text = page(figures)
    assert "default-src 'none'" in text
    assert not [reference for reference in ("url(", "@import", "http:", "https:", "//") if reference in text]
    for rows in (figures.by_class, figures.by_site, figures.by_mode, figures.by_day, figures.others):
        for group in rows:
            for value in group.values():
                assert (f"{value:,}" if isinstance(value, int) else value) in reader.text
    for figure in (
        *(f"{count:,}" for count in figures.changes.values()),
        f"{figures.alerts('before'):,} → {figures.alerts('after'):,}",
    ):
        assert figure in reader.text
    assert reader.tags >= {"svg", "path", "rect", "table"}


def test_page_escapes_values_from_messages_and_lists_all_rows() -> None:
    sites = [{"site": f"<script>{number}</script>", "added": number, "gone": 1, "moved": 0} for number in range(40)]
    figures = Backtest(
        "v", START, START, 1, dict.fromkeys(CHANGES, 0), None, [], sites, [], [{"day": "d", "before": 0, "after": 0}], []
    )
    reader = _read(figures)
    assert "script" not in reader.tags
    assert {one["site"] for one in sites} <= set(reader.text)


def test_figures_identify_the_policy_by_its_version(home: Home) -> None:
    figures = backtest(home, Policy(), None, None).figures.plain()
    assert figures["policy_version"] == Policy().version
    assert figures["from"] == format_instant(START)
