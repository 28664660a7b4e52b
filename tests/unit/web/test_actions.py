"""Commands that a page shows: they are pasted into a shell, and ids of devices are of unknown origin."""

import re
import shlex
from collections.abc import Collection, Iterator
from html import unescape

import pytest
from starlette.requests import Request
from typer.testing import CliRunner

from cli.app import app
from fleetpulse.io.home.home import Home
from fleetpulse.web.actions import ACTIONS, OF_DEVICE, OF_LIST, TYPED_FROM, command, list_offers
from fleetpulse.web.app import create_app
from tests.support.asgi import Client
from tests.support.homes.shown import shown_home
from tests.support.page_client import served

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("device", ["--home=/other", "-x", "--", "--help"])
def test_an_id_that_begins_with_a_hyphen_is_no_option(device: str, home: Home) -> None:
    of_home = ["--home", str(home.path)]
    words = {name: shlex.split(command(home, ACTIONS[name].words, device)) for name in OF_DEVICE}
    assert words == {
        "judge-again": ["./fleet", "amend", "--device", device, *of_home],
        "hold": ["./fleet", "device", "maintain", "--for", "2h", *of_home, "--", device],
        "confirm": ["./fleet", "device", "confirm", *of_home, "--", device],
        "release": ["./fleet", "device", "release", *of_home, "--", device],
    }
    assert shlex.split(command(home, ACTIONS["release"].words, "a b"))[3] == "a b"


class _Airflow:
    """Airflow in which everybody may start every DAG."""

    def base(self, request: Request) -> str:
        del request
        return "/airflow"

    def startable(self, request: Request, dags: Collection[str]) -> frozenset[str]:
        del request
        return frozenset(dags)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return shown_home(tmp_path_factory.mktemp("shown") / "home")


@pytest.fixture(scope="module")
def client(shown: Home) -> Iterator[Client]:
    with served(shown) as client:
        yield client


def _commands(text: str) -> list[list[str]]:
    """Return the words of the commands that a page shows."""
    shown = re.findall(r'<pre class="command".*?</pre>', text, re.DOTALL)
    return [shlex.split(unescape(re.sub("<[^>]*>", "", one))) for one in shown]


@pytest.mark.parametrize("query", ["mode=online", "mode=unreachable&site=harbour&class=pump", "q=PUMP-1&trigger=signal"])
def test_the_commands_of_a_list_select_what_it_shows(client: Client, query: str) -> None:
    text = client.get(f"/devices?{query}").text
    [count] = re.findall(r'<p class="count"[^>]*><b class="figure">(\d+)</b>', text)
    found = _commands(text)
    assert [words[3] for words in found] == ["maintain", "update", "release"]
    for words in found:
        assert words[:3] == ["./fleet", "device", "bulk"] and f"--expect={count}" in words
    done = CliRunner().invoke(app, [*found[2][1:], "--dry-run", "--json"])
    assert done.exit_code == (0 if "online" not in query else 1), done.output
    if done.exit_code == 0:
        assert len(done.stdout.splitlines()) == int(count) > 0
    else:
        assert getattr(done.exception, "code", "") == "commands-faulty", "the hostile ids of the home are named"


def test_only_a_filtered_list_has_actions(client: Client) -> None:
    assert _commands(client.get("/devices").text) == []
    assert _commands(client.get("/devices?sort=device").text) == []
    assert _commands(client.get("/devices?q=nothing-has-this").text) == []


def test_a_filter_is_quoted_in_a_command(shown: Home) -> None:
    request = Request({"type": "http", "app": create_app(shown, hosts=("localhost",)), "headers": []})
    for offer in list_offers(request, {"q": "a'; rm -rf \"$(x)", "never_seen": "true"}, 3):
        words = shlex.split(offer.command)
        assert "--q=a'; rm -rf \"$(x)" in words and "--never-seen=true" in words and not offer.may_start


def test_a_form_of_a_list_has_its_filter_and_asks_for_a_large_number(shown: Home) -> None:
    request = Request({"type": "http", "app": create_app(shown, hosts=("localhost",), starter=_Airflow()), "headers": []})
    for count, kind, value in ((TYPED_FROM, "fixed", str(TYPED_FROM)), (TYPED_FROM + 1, "required", "")):
        found = list_offers(request, {"mode": "offline", "q": "pump"}, count)
        assert [one.name for one in found] == [*OF_LIST] and all(one.may_start for one in found)
        for one in found:
            fields = {field.name: field for field in one.fields}
            assert (fields["expect"].kind, fields["expect"].value) == (kind, value)
            assert (fields["mode"].value, fields["q"].value, fields["action"].kind) == ("offline", "pump", "fixed")
