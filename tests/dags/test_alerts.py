"""Who is told of what: no run that has ended is told as late, and each way is tried until it has worked."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.airflows import OF_AIRFLOW

pytestmark = OF_AIRFLOW


@pytest.mark.parametrize("state", ["success", "failed"])
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_a_run_that_has_ended_is_not_told_as_late(monkeypatch: pytest.MonkeyPatch, state: str, kind: Any) -> None:
    assert _delays_told(monkeypatch, kind(dag_run_id="manual", run_id="manual", state=state)) == []


@pytest.mark.parametrize("run", [{"dag_run_id": "manual", "state": "running"}, SimpleNamespace(run_id="manual", state="running")])
def test_a_run_that_goes_on_past_its_deadline_is_told(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    reason = "the run has not ended within 1:00:00"
    assert _delays_told(monkeypatch, run) == [{"dag": "fleet_report", "run": "manual", "task": "", "reason": reason}]


def _delays_told(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[dict[str, str]]:
    from fleetpulse.orchestration import alerts

    told: list[dict[str, str]] = []
    monkeypatch.setattr(alerts, "tell", lambda _, one: told.append(one))
    asyncio.run(alerts.tell_of_delay("fleet_report", "1:00:00", context={"dag_run": run}))
    return told


def test_a_way_that_was_down_is_tried_again_though_the_other_one_worked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetpulse.orchestration import alerts
    from fleetpulse.orchestration.place import Place

    ways: dict[str, bool | OSError] = {"webhook": OSError("it is down"), "topic": True}

    def through(name: str) -> Any:
        def way(*_: Any) -> bool:
            found = ways[name]
            if isinstance(found, OSError):
                raise found
            return found

        return way

    monkeypatch.setattr(alerts, "_post", through("webhook"))
    monkeypatch.setattr(alerts, "_publish", through("topic"))
    place, told = Place("fleet", tmp_path), {"dag": "a", "run": "b", "task": "c", "reason": "3 rows fail"}
    assert alerts.tell(place, told) == ["topic"]
    assert alerts.tell(place, told) == []
    ways["webhook"] = False  # none is set up: it has told nothing
    assert alerts.tell(place, told) == []
    ways["webhook"] = True
    assert alerts.tell(place, told) == ["webhook"]
    assert alerts.tell(place, told) == []
