"""Notifications of failures and delays: ended runs are not late, and each channel is retried."""

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.airflow import OF_AIRFLOW

pytestmark = OF_AIRFLOW


@pytest.mark.parametrize("state", ["success", "failed"])
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_an_ended_run_is_not_reported_as_late(monkeypatch: pytest.MonkeyPatch, state: str, kind: Any) -> None:
    assert _reported_delays(monkeypatch, kind(dag_run_id="manual", run_id="manual", state=state)) == []


@pytest.mark.parametrize("run", [{"dag_run_id": "manual", "state": "running"}, SimpleNamespace(run_id="manual", state="running")])
def test_a_run_that_exceeds_its_deadline_is_reported(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    reason = "the run did not end within its deadline of 1:00:00"
    assert _reported_delays(monkeypatch, run) == [{"dag": "fleet_report", "run": "manual", "task": "", "reason": reason}]


def _reported_delays(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[dict[str, str]]:
    from fleetpulse.orchestration import notifications

    reported: list[dict[str, str]] = []
    monkeypatch.setattr(notifications, "notify", lambda _, one: reported.append(one))
    asyncio.run(notifications.notify_missed_deadline("fleet_report", "1:00:00", context={"dag_run": run}))
    return reported


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("3 rows fail"), "3 rows fail"),
        (MemoryError(), "MemoryError()"),
        (TimeoutError("\n"), "TimeoutError('\\n')"),
        (None, "no reason given; see the log of the task"),
    ],
)
def test_a_failure_without_a_message_is_reported_by_its_type(
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


@pytest.mark.parametrize(
    "webhook", ["https://a.example/se cret", "https://a.example:secret/", "https://[secret/", "ftp://secret"]
)
def test_the_log_does_not_have_the_address_of_the_webhook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, webhook: str
) -> None:
    from fleetpulse.orchestration import notifications
    from fleetpulse.orchestration.config import OrchestrationConfig

    monkeypatch.setattr(notifications, "_LOG", logging.getLogger("test of notifications"))
    place = OrchestrationConfig("fleet", tmp_path, webhook)
    with caplog.at_level(logging.WARNING):
        assert notifications.notify(place, {"dag": "a", "run": "b", "task": "c", "reason": "3 rows fail"}) == []
    assert "a failure of a by webhook" in caplog.text and "cret" not in caplog.text


def test_a_failed_channel_is_retried_although_the_other_one_worked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetpulse.orchestration import notifications
    from fleetpulse.orchestration.config import OrchestrationConfig

    channels: dict[str, bool | OSError] = {"webhook": OSError("it is down"), "topic": True}

    def channel(name: str) -> Any:
        def send(*_: Any) -> bool:
            found = channels[name]
            if isinstance(found, OSError):
                raise found
            return found

        return send

    monkeypatch.setattr(notifications, "_post", channel("webhook"))
    monkeypatch.setattr(notifications, "_publish", channel("topic"))
    place, failure = OrchestrationConfig("fleet", tmp_path), {"dag": "a", "run": "b", "task": "c", "reason": "3 rows fail"}
    assert notifications.notify(place, failure) == ["topic"]
    assert notifications.notify(place, failure) == []
    channels["webhook"] = False  # not configured: nothing is sent
    assert notifications.notify(place, failure) == []
    channels["webhook"] = True
    assert notifications.notify(place, failure) == ["webhook"]
    assert notifications.notify(place, failure) == []


def _mark_of(reason: str, run: str = "scheduled__2026-01-31T12:00:00+00:00") -> str:
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
def test_a_number_in_a_name_distinguishes_failures(one: str, other: str) -> None:
    assert _mark_of(one) != _mark_of(other)


def test_each_manual_run_is_reported_and_scheduled_runs_once_an_hour() -> None:
    reason = "3 rows fail"
    manual = {_mark_of(reason, run) for run in ("manual__2026-01-31T12:00:00+00:00", "manual__2026-01-31T12:07:00+00:00", "mine")}
    assert len(manual) == 3
    automatic = {_mark_of(reason, run) for run in ("scheduled__1", "scheduled__2", "asset_triggered__3")}
    assert len(automatic) == 1
