"""Amended homes: shown transitions, spooled commands, comparison with definition."""

import json
from typing import Any

from fleetpulse.core.amendments import content, effective_transitions, histories, transitions
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Origin, Row
from fleetpulse.io.home.home import Home
from fleetpulse.reports import judgements
from fleetpulse.reports.device_judgements import judgements_by_device
from fleetpulse.reports.messages import rows_through
from tests.support.histories.histories import START

DEPLOYMENT = Deployment(allowed_lateness_ms=1_000, max_clock_lead_ms=300_000)


RULES: dict[str, Any] = {"rules": {"timeout": "60s", "forget_after": "10h"}, "classes": {"slow": {"timeout": "10m"}}}


def transitions_of(home: Home, device_id: str = "d") -> list[tuple[float, str, str]]:
    """Return a device's amended transitions: seconds after START, mode, trigger."""
    rows = judgements.transitions(home, device_id)
    return [(one["event_time"].timestamp() - START / 1000, one["to_mode"], one["trigger"]) for one in rows]


def correction_rows(home: Home, received_s: float) -> list[Row]:
    """Take the spooled commands, as the bridge does, and return them as rows."""
    rows: list[Row] = []
    for path in sorted(home.commands.glob("*.json")):
        for one in json.loads(path.read_text()):
            decoded = decode(one["topic"], json.dumps(one["payload"]).encode(), START + int(received_s * 1000), Origin.COMMAND)
            assert isinstance(decoded, Row), decoded
            rows.append(decoded)
        path.unlink()
    return rows


def agrees_with_definition(home: Home, device_id: str = "d") -> bool:
    """Return whether the shown transitions equal a judgement without late messages."""
    judged = histories(rows_through(home, [device_id], None), home.deployment())
    known = effective_transitions(judgements_by_device(home, [device_id])[device_id])
    read = [(one["kind"], one["transition_no"], one["amendment_no"]) for one in judgements.transitions(home, device_id)]
    assert read == [(one.kind, one.transition_no, one.amendment_no) for one in known]
    return [content(one) for one in known] == [content(one) for one in transitions(judged.amended).get(device_id, [])]
