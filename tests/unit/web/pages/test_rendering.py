"""Static files of the page, addresses of devices, and formats of numbers and times."""

import gzip
import json
import re
from hashlib import sha256

import pytest

from fleetpulse.io.home.home import Home
from fleetpulse.paths import ROOT
from fleetpulse.web.pages.rendering import ago, clock, coarse, device_path, number, query_of, signed, static_address, static_files
from tests.support.asgi import Client
from tests.support.page_client import served

pytestmark = pytest.mark.unit
VENDOR = ROOT / "fleetpulse" / "web" / "static" / "vendor"
NOON_MS = 1_700_049_600_000  # 2023-11-15T12:00:00Z


def _size(name: str) -> int:
    return len(gzip.compress(static_files()[name].content))


def test_a_static_file_is_kept_by_its_digest(home: Home) -> None:
    with served(home) as client:
        _check_files(client)


def _check_files(client: Client) -> None:
    for name, found in static_files().items():
        answer = client.get(static_address(name))
        assert (answer.status, answer.content) == (200, found.content)
        assert "immutable" in answer.headers["cache-control"]
    name = "fleet.css"
    packed = client.get(static_address(name), {"accept-encoding": "gzip, br"})
    assert gzip.decompress(packed.content) == static_files()[name].content
    assert packed.headers["content-encoding"] == "gzip"
    old = client.get(f"/static/000000000000/{name}")
    assert (old.status, old.headers["cache-control"]) == (200, "no-cache")
    assert client.get("/static/0/../app.py").status == client.get("/static/0/vendor/VENDORED.json").status == 404


def test_scripts_and_styles_are_within_their_budgets() -> None:
    scripts = [name for name in static_files() if name.endswith(".js")]
    assert sum(map(_size, scripts)) <= 45_000
    assert _size("fleet.js") <= 7_000
    assert _size("fleet.css") <= 12_000


def test_vendored_files_have_their_recorded_digests_and_notices() -> None:
    recorded = json.loads((VENDOR / "VENDORED.json").read_text())
    digests = {name: digest for one in recorded for name, digest in one["files"].items()}
    assert digests == {
        path.name: sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir() if path.name != "VENDORED.json"
    }
    notices = (ROOT / "THIRD_PARTY_NOTICES.md").read_text()
    for one in recorded:
        assert f"| {one['name']} | {one['version']} | {one['license']} |" in notices


def test_every_static_file_and_template_belongs_to_the_wheel() -> None:
    ignored = (ROOT / ".gitignore").read_text()
    assert not re.search(r"^\*\.(js|css|html|svg|txt|json)$|templates|static", ignored, re.MULTILINE)


@pytest.mark.parametrize(
    ("device_id", "path"),
    [("pump-1", "/devices/pump-1"), ("a/b c%", "/devices/a%2Fb%20c%25"), ("..", "/devices/-?id=.."), ("-", "/devices/-?id=-"),
     ("ж", "/devices/%D0%B6")],
)  # fmt: skip
def test_the_path_of_a_device_has_its_id(device_id: str, path: str) -> None:
    assert device_path(device_id) == path
    assert device_path(device_id, "why").startswith(path.partition("?")[0] + "/why")


def test_a_query_has_no_empty_parameters() -> None:
    assert query_of({"a": "1", "b": "", "c": None}, a=None) == ""
    assert query_of({"q": "a&b c"}, mode="offline") == "?q=a%26b%20c&mode=offline"


def test_numbers_and_spans_are_short() -> None:
    assert (number(1234567), number(None)) == ("1,234,567", "-")
    assert [signed(one) for one in (12, 0)] == ["+12", "±0"] and signed(-1200).endswith("1,200")
    assert [coarse(one) for one in (500, 61_000, 3 * 3_600_000, 50 * 3_600_000)] == ["0 s", "1 min", "3 h", "2 d"]
    assert (ago(NOON_MS - 60_000, NOON_MS), ago(NOON_MS + 60_000, NOON_MS)) == ("1 min ago", "in 1 min")
    assert [clock(NOON_MS - one, NOON_MS) for one in (0, 86_400_000, 400 * 86_400_000)] == [
        "12:00:00", "14 Nov 12:00:00", "2022-10-11 12:00:00",
    ]  # fmt: skip
