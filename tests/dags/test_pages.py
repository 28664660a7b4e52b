"""Pages in Airflow: only files below a page folder are shown, and only to logged-in users."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpulse.paths import ROOT
from tests.support.airflow import OF_AIRFLOW

pytestmark = OF_AIRFLOW


def test_only_a_file_below_its_folder_is_a_page(tmp_path: Path) -> None:
    from fleetpulse.orchestration.config import OrchestrationConfig
    from fleetpulse.orchestration.pages.serving import page_of

    place = OrchestrationConfig("fleet", tmp_path)
    run = place.data_folder / "backtests" / "run"
    run.mkdir(parents=True)
    (run / "report.html").write_text("here")
    (place.data_folder / "secret").write_text("not here")
    (run / "link").symlink_to(place.data_folder / "secret")
    assert page_of(place, "backtests", "run/report.html") == run / "report.html"
    for area, path in (
        ("backtests", "run"),
        ("backtests", "../secret"),
        ("backtests", "run/link"),
        ("backtests", str(place.data_folder / "secret")),
        ("backtests", "run/\0"),
        ("other", "run/report.html"),
    ):
        assert page_of(place, area, path) is None


def test_pages_require_a_login(airflow: Path, stub: object) -> None:
    from fastapi.testclient import TestClient

    from fleetpulse.orchestration.config import CONFIG
    from fleetpulse.orchestration.pages.serving import PagesApp, app

    run = CONFIG.data_folder / "backtests" / "run"
    run.mkdir(parents=True, exist_ok=True)
    (run / "report.html").write_text("here")
    (run / "style.css").write_text("too")
    with TestClient(PagesApp(CONFIG)) as client:
        assert client.get("/backtests/run/report.html").status_code == 401
    shown = app(CONFIG)
    with TestClient(shown) as client:
        for path in ("/backtests/run/report.html", "/quality/index.html", "/docs", "/openapi.json", "/"):
            assert client.get(path).status_code in (401, 403, 404), path
        assert client.get("/backtests/run/report.html").status_code == 401
        shown.dependency_overrides[_get_user()] = lambda: "somebody"
        missing = {area: client.get(f"/{area}/none.html") for area in ("backtests", "quality", "other")}
        answer = client.get("/backtests/run/report.html")
        shown.dependency_overrides.clear()
        stylesheet = client.get(str(answer.url.join("style.css")))
        outside = client.get(str(answer.url).replace("report.html", "%2e%2e/%2e%2e/%2e%2e/secret"))
        expired = client.get("/for/1-x/backtests/run/report.html")
    assert [one.status_code for one in missing.values()] == [404] * 3
    assert "keep_logs" in missing["backtests"].text and "fleet_quality" in missing["quality"].text
    assert expired.status_code == 401 and "Open the page from Airflow again" in expired.text
    for one in (*missing.values(), expired):
        assert one.headers["content-security-policy"].startswith("sandbox")
        assert '<html lang="en">' in one.text
    assert all("There is no such page" in one.text for one in missing.values())
    assert (answer.status_code, answer.text) == (200, "here")
    assert (stylesheet.status_code, stylesheet.text) == (200, "too"), "a page requests its resources without the session"
    assert outside.status_code == 404
    assert answer.headers["content-security-policy"].startswith("sandbox")
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_signed_address_expires_and_cannot_be_forged(airflow: Path) -> None:
    import time

    from fleetpulse.orchestration.config import CONFIG
    from fleetpulse.orchestration.pages.serving import is_valid_pass, signed_expiry

    good, past = (signed_expiry(int(time.time()) + until_s, CONFIG) for until_s in (60, -1))
    assert is_valid_pass(good, CONFIG) and not is_valid_pass(past, CONFIG)
    until, _, signed = good.partition("-")
    assert not any(
        is_valid_pass(made, CONFIG)
        for made in (f"{int(until, 16) + 1:x}-{signed}", until, f"{until}-", "", "x-y", "\u00e9-1", "f" * 6_000)
    )


def test_a_start_of_airflow_revokes_the_signed_addresses(airflow: Path) -> None:
    import time

    from fleetpulse.orchestration.config import CONFIG
    from fleetpulse.orchestration.database import prepare
    from fleetpulse.orchestration.pages.serving import is_valid_pass, signed_expiry

    issued = signed_expiry(int(time.time()) + 60, CONFIG)
    assert is_valid_pass(issued, CONFIG)
    assert CONFIG.pages_key.stat().st_mode & 0o077 == 0
    prepare()
    assert not is_valid_pass(issued, CONFIG)
    assert is_valid_pass(signed_expiry(int(time.time()) + 60, CONFIG), CONFIG)


def _get_user() -> object:
    from airflow.api_fastapi.core_api.security import get_user

    return get_user


_LOADED = """
from airflow import plugins_manager as manager
[app], _ = manager.get_fastapi_plugins()
assert app["url_prefix"] == "/fleet", app
import sys
assert "fastapi" not in sys.modules
assert not manager.get_import_errors(), manager.get_import_errors()
"""


def test_airflow_loads_the_plugin(tmp_path: Path) -> None:
    folder = ROOT / "fleetpulse" / "orchestration" / "plugins"
    environment = {**os.environ, "AIRFLOW__CORE__PLUGINS_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-P", "-c", _LOADED], env=environment, check=True, timeout=120)


@pytest.mark.parametrize(
    ("dag", "task", "links"),
    [
        ("fleet_backtest", "backtest", {"Report"}),
        ("fleet_quality", "check", {"Data Docs"}),
        ("fleet_quality", "docs", {"Data Docs"}),
        ("fleet_snapshot", "snapshot", {"Data Docs"}),
        *((f"fleet_{change}", "gate", {"Data Docs"}) for change in ("bootstrap", "migrate", "repartition", "rescale")),
    ],
)
def test_a_task_links_to_its_pages(dag: str, task: str, links: set[str]) -> None:
    from airflow.serialization.serialized_objects import DagSerialization

    from tests.support.airflow import built

    stored = DagSerialization.deserialize_dag(DagSerialization.serialize_dag(built(dag)))
    assert set(stored.get_task(task).extra_links) == links
