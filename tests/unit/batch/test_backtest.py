"""A backtest reads a home, whatever became of its files, and says what it cannot do; its page stands alone."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from deltalake import DeltaTable

from batch import backtest as job
from batch.backtest import backtest
from cli.commands.batch.backtest import backtest as verb
from fleetpulse.columnar.backtest.diff import CHANGES
from fleetpulse.core.errors import Misuse
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.policy import Policy, parse_policy
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Kind, Row
from fleetpulse.core.tables import MESSAGES
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance.compaction import DAY_MS
from fleetpulse.io.tables.bronze_slices import pieces_of, slices_of
from fleetpulse.reports.backtest import Backtest, verdicts
from fleetpulse.reports.backtest_html import page
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


def test_a_shorter_timeout_moves_and_adds_verdicts_and_nothing_is_written(home: Home) -> None:
    before = _files(home)
    answer = backtest(home, SHORT, None, None)
    assert _files(home) == before
    told = answer.figures
    assert [one.kind for one in replay(_history(), DEPLOYMENT)].count(JudgementKind.TRANSITION) == sum(
        m["before"] for m in told.by_mode
    )
    assert told.changes["moved"] == 7  # c falls silent five times, and all do at the end: sooner
    assert told.changes["added"] == 2 * 19  # b is silent for 50 s again and again
    assert told.changes["gone"] == 0
    assert told.moved_by_ms == -70_000
    assert (told.alerts("before"), told.alerts("after")) == (7, 26)
    assert sum(1 for _ in verdicts(answer.found)) == sum(told.changes.values())


def test_the_policy_that_was_in_force_changes_nothing(home: Home) -> None:
    told = backtest(home, LONG, None, None).figures
    assert told.changes == dict.fromkeys(CHANGES, 0)
    assert told.alerts("before") == told.alerts("after") == 7


def test_files_put_together_and_rows_of_old_versions_removed_tell_the_same(home: Home) -> None:
    want = backtest(home, SHORT, None, None).figures
    table = DeltaTable(str(home.table(MESSAGES.name)))
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert len(pieces_of(home)) == 1
    assert backtest(home, SHORT, None, None).figures == want


@pytest.mark.parametrize("max_rows", [1, 7, 30])
def test_slices_of_any_size_tell_the_same(home: Home, max_rows: int) -> None:
    whole = backtest(home, SHORT, None, None)
    pieces = pieces_of(home, max_rows)
    shuffled = [replace(piece, first_ms=pieces[0].first_ms) for piece in pieces]  # as if all of them overlapped
    for some in (pieces, sorted(shuffled, key=lambda piece: piece.first_ms)):
        question = job._question(home, SHORT, some, None, None)
        slices = slices_of(some, max_rows)
        assert len(slices) > 1 or some is not pieces
        assert job.replay_here(question, slices).to_bytes() == whole.found.to_bytes()


def test_before_the_instant_from_which_it_acts_nothing_differs(home: Home) -> None:
    from_ms = START + 500_000
    changed = backtest(home, SHORT, from_ms, None).found.changed.to_pylist()
    assert changed
    assert all((one["before_ms"] or one["after_ms"]) >= from_ms for one in changed)
    bounded = backtest(home, SHORT, from_ms, START + 700_000)
    assert {one["change"] for one in bounded.found.changed.to_pylist()} == {"added", "moved"}
    assert bounded.figures.to_ms == START + 700_000


def test_a_home_without_history_is_refused_with_what_to_do(tmp_path: Path) -> None:
    empty = Home(tmp_path / "empty")
    empty.prepare(DEPLOYMENT)
    with refused("messages-missing"):
        backtest(empty, SHORT, None, None)
    young = landed_home(tmp_path / "young", [signal(0)], DEPLOYMENT)
    with refused("interval-not-judged"):
        backtest(young, SHORT, None, None)


def test_a_range_that_is_not_kept_is_refused_and_the_oldest_instant_named(home: Home) -> None:
    oldest = format_instant(START)
    for bounds in ((START - 1, None), (None, START - 1), (None, START + 9_000_000), (START + 9_000_000, None)):
        with refused("interval-not-retained", match=f"{oldest} is the oldest instant"):
            backtest(home, SHORT, *bounds)
    with refused("interval-reversed", Misuse):
        backtest(home, SHORT, START + 2, START + 1)
    with refused("interval-not-judged"):
        backtest(home, SHORT, START + 1_495_000, None)  # received, and behind it the frontier


def test_what_retention_removed_is_refused_and_nothing_of_it_is_compared(tmp_path: Path) -> None:
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
    answer = backtest(home, SHORT, None, None)
    assert answer.figures.from_ms == kept_ms
    assert answer.figures.changes["added"] == 2 * 2 * 19, "a and b are silent for 50 s again and again"
    assert answer.found.changed == backtest(home, SHORT, kept_ms, None).found.changed
    assert all((one["before_ms"] or one["after_ms"]) >= kept_ms for one in answer.found.changed.to_pylist())


def test_a_policy_file_that_is_not_there_or_has_faults_is_named(home: Home, tmp_path: Path) -> None:
    with refused("file-unreadable"):
        verb(tmp_path / "none.toml", home.path)
    (tmp_path / "bad.toml").write_text('[rules]\ntimeout = "-5m"\n')
    with refused("policy-faulty"):
        verb(tmp_path / "bad.toml", home.path)
    with refused("home-missing"):
        verb(tmp_path / "bad.toml", tmp_path / "nowhere")


class _Reader(HTMLParser):
    """What a page shows, and what it would load."""

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


def _read(told: Backtest) -> _Reader:
    reader = _Reader()
    reader.feed(page(told))
    return reader


def test_the_page_has_every_figure_and_loads_nothing(home: Home) -> None:
    told = backtest(home, SHORT, None, None).figures
    read = _read(told)
    assert not read.loads
    assert not read.tags & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "foreignobject"}
    text = page(told)
    assert "default-src 'none'" in text
    assert not [word for word in ("url(", "@import", "http:", "https:", "//") if word in text]
    for rows in (told.by_class, told.by_site, told.by_mode, told.by_day, told.others):
        for figures in rows:
            for value in figures.values():
                assert (f"{value:,}" if isinstance(value, int) else value) in read.text
    for figure in (*(f"{count:,}" for count in told.changes.values()), f"{told.alerts('before'):,} → {told.alerts('after'):,}"):
        assert figure in read.text
    assert read.tags >= {"svg", "path", "rect", "table"}


def test_what_comes_from_messages_is_escaped_on_the_page_and_many_rows_are_all_in_the_table() -> None:
    sites = [{"site": f"<script>{number}</script>", "added": number, "gone": 1, "moved": 0} for number in range(40)]
    told = Backtest(
        "v", START, START, 1, dict.fromkeys(CHANGES, 0), None, [], sites, [], [{"day": "d", "before": 0, "after": 0}], []
    )
    read = _read(told)
    assert "script" not in read.tags
    assert {one["site"] for one in sites} <= set(read.text)


def test_a_policy_is_named_by_its_version(home: Home) -> None:
    told = backtest(home, Policy(), None, None).figures.plain()
    assert told["policy_version"] == Policy().version
    assert told["from"] == format_instant(START)
