"""Arguments of audit records: no secret, bounded, valid Unicode."""

import json
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.operations.audit import MAX_CHARS, MAX_VALUES, recorded_arguments, recorded_text

pytestmark = pytest.mark.unit
_SECRET = "hunter2-correct-horse"


@pytest.mark.parametrize(
    "arguments",
    [
        {"password": _SECRET},
        {"api_key": _SECRET, "new_token": _SECRET, "sasl_passwd": [_SECRET]},
        {"broker": f"mqtts://fleet:{_SECRET}@broker.example:8883"},
        {"broker": "x" * (MAX_CHARS - 20) + f" mqtts://fleet:{_SECRET}@broker.example:8883"},
        {"only": f"password = '{_SECRET}' AND site = 'north'"},
        {"kafka": [f'sasl.jaas.config=login required username="a" password="{_SECRET} two";']},
        {"body": json.dumps({"client_secret": _SECRET})},
        {"jaas": _SECRET, "kafka": [f"ssl.keystore.key={_SECRET}"]},
    ],
)
def test_a_secret_is_not_recorded(arguments: dict[str, Any]) -> None:
    recorded = recorded_arguments(arguments)
    assert "hunter2" not in recorded and "***" in recorded and "two" not in recorded


def test_given_arguments_are_recorded_by_their_names() -> None:
    arguments = {"device_id": "pump-1", "from_": "2026-01-31T12:00:00Z", "keep": 0, "gate": True, "file": Path("a.toml")}
    absent = {"site": None, "hold": False, "nodes": [], "only": ()}
    recorded = recorded_arguments({**arguments, **absent, "mode": Mode.OFFLINE, "key_groups": 16})
    assert json.loads(recorded) == {
        "device_id": "pump-1",
        "from": "2026-01-31T12:00:00Z",
        "keep": 0,
        "gate": True,
        "file": "a.toml",
        "mode": "offline",
        "key_groups": 16,
    }


def test_a_record_is_bounded_and_valid_unicode() -> None:
    recorded = json.loads(recorded_arguments({"device": ["a" * 10_000] * 1_000, "name": "pump\udcff\n"}))
    assert [len(one) for one in recorded["device"][:MAX_VALUES]] == [MAX_CHARS + 3] * MAX_VALUES
    assert recorded["device"][MAX_VALUES:] == [f"and {1_000 - MAX_VALUES} more"]
    assert recorded["name"] == "pump\\udcff\n"
    assert recorded_text("b" * MAX_CHARS) == "b" * MAX_CHARS
