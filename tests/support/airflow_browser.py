"""Airflow of a running fleet: its API, and a logged-in user in the system's Chromium."""

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Page, sync_playwright

from fleetpulse.io.home.home import Home
from fleetpulse.io.system.process import read_status
from tests.support.browser import CHROMIUM
from tests.support.wait import PATIENCE_S, await_that

PICTURES: Final = os.environ.get("FLEET_PICTURES")  # folder for new pictures of the documentation
PICTURED: Final = ("dags", "bootstrap-form", "migrate-approval", "refused", "supervise")
ENDED: Final = ("success", "failed")
ASKING: Final = ("deferred", "awaiting_input")  # states of a task that waits for an approval


@dataclass
class AirflowBrowser:
    """A browser with a logged-in user.

    Attributes:
        page: page of the browser.
        url: address of Airflow.
        token: token of ``admin`` for the API.
    """

    page: Page
    url: str
    token: str

    def picture(self, name: str) -> None:
        """Take a picture, if new pictures of the documentation are requested."""
        if PICTURES and name in PICTURED:
            self.page.wait_for_timeout(1500)  # animations end
            self.page.screenshot(path=Path(PICTURES) / f"airflow-{name}.png")

    def ask(self, path: str, body: Any = None) -> Any:
        """Return a response of the API; a body is posted."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/api/v2/{path}", content, headers), timeout=60) as answer:
            return json.load(answer)

    def trigger(self, dag: str, **form: str) -> str:
        """Trigger a DAG by its form; return the run's id."""
        self.page.goto(f"{self.url}/dags/{dag}")
        self.page.get_by_role("button", name="Trigger").first.click()
        dialog = self.page.get_by_role("dialog")
        for name, value in form.items():
            dialog.locator(f"input[name=element_{name}]").fill(value)
        self.page.wait_for_timeout(500)  # the form accepts a value after the typing has ended
        self.picture(f"{dag.removeprefix('fleet_')}-form")
        dialog.get_by_role("button", name="Trigger", exact=True).click()
        self.page.wait_for_url(f"**/dags/{dag}/runs/**")
        return self.page.url.rpartition("/runs/")[2].partition("/")[0].partition("?")[0]

    def post(self, dag: str, **form: str) -> str:
        """Trigger a DAG by the API, as ``admin``; return the run's id."""
        return self.ask(f"dags/{dag}/dagRuns", {"logical_date": None, "conf": form})["dag_run_id"]

    def await_end(self, dag: str, run: str) -> str:
        """Wait for the end of a run; return its state."""
        self.page.goto("about:blank")  # the page of an active run uses a fifth of a core
        limit = time.monotonic() + PATIENCE_S
        while (state := self.ask(f"dags/{dag}/dagRuns/{run}")["state"]) not in ENDED:
            assert time.monotonic() < limit, f"{dag} is {state} after {PATIENCE_S} s: {self.tasks(dag, run)}"
            time.sleep(2)
        self.page.goto(f"{self.url}/dags/{dag}/runs/{run}")
        self.page.get_by_text("Success" if state == "success" else "Failed").first.wait_for()
        return state

    def tasks(self, dag: str, run: str) -> dict[str, str]:
        """Return the state of each task of a run."""
        found = self.ask(f"dags/{dag}/dagRuns/{run}/taskInstances")["task_instances"]
        return {one["task_id"]: one["state"] for one in found}

    def log_of(self, dag: str, run: str, task: str) -> str:
        """Return the log of the first try of a task."""
        content = self.ask(f"dags/{dag}/dagRuns/{run}/taskInstances/{task}/logs/1?full_content=true")["content"]
        return "\n".join(json.dumps(line) for line in content)

    def answer(self, dag: str, run: str, answer: str, plan: str, task: str = "approve") -> None:
        """Wait until a run asks for approval, read its plan, and answer; answer again if Airflow has lost the answer.

        Args:
            dag: DAG of the run.
            run: id of the run.
            answer: name of the button, ``Approve`` or ``Reject``.
            plan: text of the plan that the page shows.
            task: task that asks.
        """
        limit = time.monotonic() + PATIENCE_S
        while (state := self.tasks(dag, run)[task]) != "success":
            if state in ("failed", "upstream_failed", "skipped") or time.monotonic() > limit:
                self.await_end(dag, run)
                raise AssertionError(f"{task} is {state}: {self.tasks(dag, run)}\n{self.log_of(dag, run, 'outcome')}")
            if state in ASKING:
                self.page.goto(f"{self.url}/dags/{dag}/runs/{run}/required_actions")
                self.page.get_by_text(plan).first.wait_for()
                self.picture(f"{dag.removeprefix('fleet_')}-approval")
                self.page.get_by_role("button", name=answer).click()
                await_that(lambda: self.tasks(dag, run)[task] not in ASKING, what=f"the answer of {task} is taken", limit_s=60)
                self.page.goto("about:blank")
            time.sleep(1)


@contextmanager
def airflow_browser(home: Home, user: str = "admin") -> Iterator[AirflowBrowser]:
    """Start a browser, and log in to the Airflow of a running fleet.

    Args:
        home: home of the fleet.
        user: user of the page. The API is used as ``admin``.
    """
    url, passwords = read_status(home.run("airflow"))["url"], json.loads((home.path / "airflow" / "passwords.json").read_text())
    body = json.dumps({"username": "admin", "password": passwords["admin"]}).encode()
    request = urllib.request.Request(f"{url}/auth/token", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        token = json.load(answer)["access_token"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # tests may run as root
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(120_000)
        page.goto(url)
        page.get_by_label("Username").fill(user)
        page.get_by_label("Password").fill(passwords[user])
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("link", name="Dags").first.wait_for()
        yield AirflowBrowser(page, url, token)
        chromium.close()
