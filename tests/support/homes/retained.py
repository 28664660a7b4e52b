"""Home of several days with snapshots, from which old messages are removed."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deltalake import CommitProperties, write_deltalake

from fleetpulse.core.amendments import content, effective_transitions, histories, transitions
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment, outcome
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, MESSAGES
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import SnapshotInfo, snapshots
from fleetpulse.reports.device_judgements import judgements_by_device
from fleetpulse.reports.history.replay_origin import applicable_amend_progress
from tests.support.histories.histories import row, signal, tick
from tests.support.histories.key_groups import Stream, snapshot_of
from tests.support.homes.homes import JudgedHome, apply_retention, empty

DEPLOYMENT = Deployment(allowed_lateness_ms=1_000, max_clock_lead_ms=300_000)
DAY_S = 86_400
DAY_MS = 1000 * DAY_S
RULES: dict[str, Any] = {"rules": {"timeout": "1h", "forget_after": "100d"}, "classes": {"slow": {"timeout": "2h"}}}


class RetainedHome(JudgedHome):
    """Home of several days, with snapshots and the removal of old messages."""

    def snapshot(self) -> SnapshotInfo:
        """Write a snapshot of the state after all rows so far, as the job does."""
        newest_ms, frontier_ms = self.rows[-1].received_at_ms, outcome(self.rows, DEPLOYMENT).frontier_ms
        bronze = tables.version(self.home.table(MESSAGES.name)) + 1
        amended_ms, unmet = applicable_amend_progress(self.home, newest_ms)
        return self.write(SnapshotInfo(1, 0, bronze, newest_ms, frontier_ms, 2, 2, amended_ms, unmet=unmet))

    def write(self, taken: SnapshotInfo) -> SnapshotInfo:
        """Write a snapshot with given metadata, and the state at its position."""
        stream = Stream(DEPLOYMENT, 2, {})
        stream.batch([one for one in self.rows if one.received_at_ms <= (taken.newest_ms or 0)])
        note = json.dumps({name: value for name, value in asdict(taken).items() if name not in ("version", "at_ms")})
        properties = CommitProperties(custom_metadata={"userMetadata": note})
        table = str(self.home.table(DEVICE_SNAPSHOTS.name))
        write_deltalake(table, snapshot_of(stream), mode="overwrite", commit_properties=properties)
        return taken

    def forget(self) -> None:
        """Remove messages that are older than a day and that no snapshot needs."""
        apply_retention(
            self.home,
            min((one.bronze for one in snapshots(self.home)), default=tables.version(self.home.table(MESSAGES.name))),
            DAY_MS,
        )

    def agrees(self, device_id: str = "d", after_ms: int = 0) -> bool:
        """Return whether the shown transitions follow from the whole history.

        The history includes the removed messages.
        """
        wanted = transitions(histories(self.rows, DEPLOYMENT).amended).get(device_id, [])
        known = effective_transitions(judgements_by_device(self.home, [device_id])[device_id])
        first, second = ([content(o) for o in some if (o.event_time_ms or 0) > after_ms] for some in (known, wanted))
        return first == second


def day(number: int, after_s: float = 0) -> float:
    return number * DAY_S + after_s


def two_days(path: Path) -> RetainedHome:
    """Create a home with a device heard on two days, a snapshot, and later ticks."""
    kept = RetainedHome(empty(path, DEPLOYMENT))
    policy = row(0, "fleet/_/_/policy", policy=parse_policy(RULES).normalised(), effective_from_s=-1000)
    kept.land_and_judge(policy, signal(10, "g"), signal(10, gateway="gw"), tick(5000))
    kept.land_and_judge(signal(day(1, 10)), tick(day(1, 100)))
    kept.snapshot()
    kept.land_and_judge(signal(day(1, 100)), tick(day(1, 8000)))  # received in the millisecond of the snapshot's last row
    kept.land_and_judge(tick(day(3)))
    return kept


def late(*at_s: float, received_s: float) -> Sequence[Row]:
    return [signal(one, received_s=received_s, gateway="gw") for one in at_s]
