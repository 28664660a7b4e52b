"""Judgements of a history, batch by batch, as the job and amendments emit them."""

from collections.abc import Sequence
from typing import Any

from fleetpulse.core.amendments import amend
from fleetpulse.core.amendments import histories as both_histories
from fleetpulse.core.judgements import Judgement, compared
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Row
from tests.support.histories.histories import judgement_entry


class Emitted:
    """Emitter of the judgements of rows.

    Args:
        rows: rows in the order of ``received_at``.
        deployment: lateness, clock lead and jitter.
    """

    def __init__(self, rows: Sequence[Row], deployment: Deployment) -> None:
        self._rows, self._deployment = rows, deployment
        self._before = compared([])
        self._amended: dict[str, list[Judgement]] = {one.device_id: [] for one in rows}

    def batch(self, cut: int, *, amending: bool) -> list[dict[str, Any]]:
        """Return the new judgements of the rows up to a cut."""
        judgements = replay(self._rows[:cut], self._deployment)
        fresh = compared(judgements) - self._before
        self._before = compared(judgements)
        found: list[Judgement] = []
        for one in judgements:
            key = next(iter(compared([one])))
            if fresh[key] > 0:
                fresh[key] -= 1
                found.append(one)
        if amending:
            amended = amend(both_histories(self._rows[:cut], self._deployment), self._amended)
            for device_id, more in amended.items():
                self._amended[device_id] += more
                found += more
        return [judgement_entry(one, self._rows[cut - 1].received_at_ms) for one in found]
