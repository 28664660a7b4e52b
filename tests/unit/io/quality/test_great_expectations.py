"""The pages of the looks at the data: what is linked is there."""

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


def test_no_page_links_to_one_that_is_not_there_whatever_was_looked_at_last(tmp_path: Path) -> None:
    home = judged_home(tmp_path / "home", eventful_history(5), Deployment(30_000, 20_000))
    run(home, ["transitions", "coverage spans"])
    run(home, ["snapshot"])
    pages = Expectations(home.path / "quality", "").build_docs().parent
    _all_are_there(pages)
    for page in pages.rglob("*.html"):
        page.write_text("")
    assert Expectations(home.path / "quality", "").build_docs(anew=True).stat().st_size
    _all_are_there(pages)


def _all_are_there(pages: Path) -> None:
    linked = {
        (page.parent / link).resolve()
        for page in pages.rglob("*.html")
        for link in re.findall(r'href="([^"#:]+\.html)"', page.read_text())
    }
    assert {"transitions.html", "snapshot.html"} <= {page.name for page in linked}
    assert [page for page in linked if not page.exists()] == []
