"""Who is told of what: no run that has ended is told as late, and each way is tried until it has worked."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.airflow import OF_AIRFLOW

pytestmark = OF_AIRFLOW


@pytest.mark.parametrize("state", ["success", "failed"])
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_a_run_that_has_ended_is_not_told_as_late(monkeypatch: pytest.MonkeyPatch, state: str, kind: Any) -> None:
    assert _delays_told(monkeypatch, kind(dag_run_id="manual", run_id="manual", state=state)) == []


@pytest.mark.parametrize("run", [{"dag_run_id": "manual", "state": "running"}, SimpleNamespace(run_id="manual", state="running")])
def test_a_run_that_goes_on_past_its_deadline_is_told(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    reason = "the run did not end within its deadline of 1:00:00"
    assert _delays_told(monkeypatch, run) == [{"dag": "fleet_report", "run": "manual", "task": "", "reason": reason}]


def _delays_told(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[dict[str, str]]:
    from fleetpulse.orchestration import notifications

    told: list[dict[str, str]] = []
    monkeypatch.setattr(notifications, "notify", lambda _, one: told.append(one))
    asyncio.run(notifications.notify_missed_deadline("fleet_report", "1:00:00", context={"dag_run": run}))
    return told


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("3 rows fail"), "3 rows fail"),
        (MemoryError(), "MemoryError()"),
        (TimeoutError("\n"), "TimeoutError('\\n')"),
        (None, "no reason given; see the log of the task"),
    ],
)
def test_a_failure_without_a_text_is_told_by_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, reason: str
) -> None:
    from fleetpulse.orchestration import notifications
    from fleetpulse.orchestration.config import OrchestrationConfig

    posted: list[Any] = []
    monkeypatch.setattr(notifications, "CONFIG", OrchestrationConfig("fleet", tmp_path))
    monkeypatch.setattr(notifications, "_post", lambda *args: posted.append(json.loads(args[2])) or True)
    monkeypatch.setattr(notifications, "_publish", lambda *_: False)
    task = SimpleNamespace(dag_id="a", run_id="manual", task_id="c")
    notifications.notify_failure({"ti": task, "exception": error})
    assert [one["reason"] for one in posted] == [reason]


def test_a_way_that_was_down_is_tried_again_though_the_other_one_worked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetpulse.orchestration import notifications
    from fleetpulse.orchestration.config import OrchestrationConfig

    ways: dict[str, bool | OSError] = {"webhook": OSError("it is down"), "topic": True}

    def through(name: str) -> Any:
        def way(*_: Any) -> bool:
            found = ways[name]
            if isinstance(found, OSError):
                raise found
            return found

        return way

    monkeypatch.setattr(notifications, "_post", through("webhook"))
    monkeypatch.setattr(notifications, "_publish", through("topic"))
    place, told = OrchestrationConfig("fleet", tmp_path), {"dag": "a", "run": "b", "task": "c", "reason": "3 rows fail"}
    assert notifications.notify(place, told) == ["topic"]
    assert notifications.notify(place, told) == []
    ways["webhook"] = False  # none is set up: it has told nothing
    assert notifications.notify(place, told) == []
    ways["webhook"] = True
    assert notifications.notify(place, told) == ["webhook"]
    assert notifications.notify(place, told) == []


def _known_by(reason: str, run: str = "scheduled__2026-01-31T12:00:00+00:00") -> str:
    from fleetpulse.orchestration.notifications import _mark

    return _mark({"dag": "fleet_amend", "run": run, "task": "amend", "reason": reason})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("device pump-1 is not known", "device pump-2 is not known"),
        ('there is no device "17"', 'there is no device "18"'),
        ("first: device_id a life 2026-01-31T12:00:00.000Z", "first: device_id a life 2026-01-31T12:00:01.000Z"),
        ("nobody answers at 10.0.0.1:1883", "nobody answers at 10.0.0.2:1883"),
        ("gen-0002/offsets cannot be read", "gen-0003/offsets cannot be read"),
        ("line4 stands still", "line5 stands still"),
    ],
)
def test_a_figure_in_a_name_tells_one_failure_from_another(one: str, other: str) -> None:
    assert _known_by(one) != _known_by(other)


def test_each_run_that_a_person_triggered_is_told_of_and_of_a_schedule_one_an_hour() -> None:
    reason = "3 rows fail"
    by_hand = {
        _known_by(reason, run) for run in ("manual__2026-01-31T12:00:00+00:00", "manual__2026-01-31T12:07:00+00:00", "mine")
    }
    assert len(by_hand) == 3
    by_itself = {_known_by(reason, run) for run in ("scheduled__1", "scheduled__2", "asset_triggered__3")}
    assert len(by_itself) == 1
