"""Pages of the quality suites: every linked page exists."""

import re
from pathlib import Path

import pytest

from batch.quality.run import run
from fleetpulse.core.replay import Deployment
from fleetpulse.io.quality.great_expectations import Expectations
from tests.support.homes.quality import eventful_history, judged_home

pytestmark = [
    pytest.mark.unit,
    pytest.mark.timeout(600),  # the library alone takes seconds to import
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # that library's own
]


def test_quality_pages_link_only_to_existing_pages_after_any_run(tmp_path: Path) -> None:
    home = judged_home(tmp_path / "home", eventful_history(5), Deployment(30_000, 20_000))
    run(home, ["transitions", "coverage spans"])
    run(home, ["snapshot"])
    pages = Expectations(home.path / "quality", "").build_docs().parent
    _assert_linked_pages_exist(pages)
    for page in pages.rglob("*.html"):
        page.write_text("")
    assert Expectations(home.path / "quality", "").build_docs(rebuild_all=True).stat().st_size
    _assert_linked_pages_exist(pages)


def _assert_linked_pages_exist(pages: Path) -> None:
    linked = {
        (page.parent / link).resolve()
        for page in pages.rglob("*.html")
        for link in re.findall(r'href="([^"#:]+\.html)"', page.read_text())
    }
    assert {"transitions.html", "snapshot.html"} <= {page.name for page in linked}
    assert [page for page in linked if not page.exists()] == []
