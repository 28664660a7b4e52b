"""Comparison of a home's judgements with the definition's for the same rows."""

from collections import Counter
from pathlib import Path
from typing import Any

from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Row
from fleetpulse.core.times import format_instant
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest import recording
from fleetpulse.reports import judgements, messages
from tests.support.fleet_command import rows_of
from tests.support.histories.histories import START, row


def defined_judgements(path: Path, policy: dict[str, Any], lateness_ms: int) -> Counter[tuple[Any, ...]]:
    """Return the transitions of a recording by the definition."""
    rows: list[Row] = list(recording.rows(path))
    first = rows[0].received_at_ms
    in_force = row((first - START) / 1000, "fleet/_/_/policy", policy=parse_policy(policy).normalised(), effective_from=0)
    return Counter(
        (
            one.device_id,
            format_instant(one.life_ms or 0),
            one.transition_no,
            one.from_mode and one.from_mode.value,
            one.to_mode and one.to_mode.value,
            one.trigger and one.trigger.value,
            format_instant(one.event_time_ms or 0),
            one.runtime_ms,
            one.policy_version,
        )
        for one in replay([in_force, *rows], Deployment(lateness_ms))
        if one.kind == "transition"
    )


def emitted_judgements(home: Path) -> Counter[tuple[Any, ...]]:
    names = (
        "device_id",
        "life",
        "transition_no",
        "from_mode",
        "to_mode",
        "trigger",
        "event_time",
        "runtime_ms",
        "policy_version",
    )
    return Counter(tuple(one[name] for name in names) for one in rows_of("transitions", "--json", "--home", str(home)))


def require_equal_to_definition(home: Home) -> None:
    """Compare a home's transitions with the definition, up to the job's position.

    The job may have stopped before its last row. All its transitions must be right, and all
    transitions up to its position must be present.
    """
    reached = judged_up_to(home.checkpoint)
    assert reached is not None
    rows = messages.rows(home)

    def transitions(up_to_ms: int) -> set[tuple[Any, ...]]:
        judged = replay([one for one in rows if one.received_at_ms <= up_to_ms], home.deployment())
        return {
            (one.device_id, one.life_ms, one.transition_no, str(one.to_mode), one.event_time_ms)
            for one in judged
            if one.kind == "transition"
        }

    emitted = {
        (
            one["device_id"],
            round(one["life"].timestamp() * 1000),
            one["transition_no"],
            one["to_mode"],
            round(one["event_time"].timestamp() * 1000),
        )
        for one in judgements.transitions(home)
    }
    assert transitions(reached[1]) <= emitted <= transitions(max(one.received_at_ms for one in rows))
