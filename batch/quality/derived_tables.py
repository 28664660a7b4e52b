"""The state under test, and tables derived for the suites on first use.

Rule: an input that is too damaged to be read is a fault of the suites that read it, and of no other
suite.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from batch.common.progress import ReportProgress, silent
from batch.quality import facts as evidence
from batch.quality.facts import EvaluationPoint, one_row
from batch.quality.rejudge import is_still_complete, replay_bronze
from fleetpulse.core.errors import FleetError
from fleetpulse.core.quality.suites import Suite
from fleetpulse.core.replay import EMPTY_OUTCOME
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, MESSAGES, QUARANTINE
from fleetpulse.io.checkpoints.generations import load_generations
from fleetpulse.io.home.home import Home
from fleetpulse.io.quality.suite_inputs import OpenedTables
from fleetpulse.io.tables import tables as delta
from fleetpulse.io.tables.snapshots import SnapshotInfo, snapshots
from fleetpulse.reports.messages import span

DAMAGED: Final = (ValueError, LookupError, TypeError, AttributeError, AssertionError, FleetError)
_FROM_NOWHERE: Final = (
    "bronze no longer has the first rows, and there is no snapshot from which on bronze is complete; "
    "take one regularly: ./fleet state snapshot"
)
_ROWS_REMOVED: Final = "maintenance removed messages of the replay meanwhile"
_NOT_COUNTED: Final = "bronze has no count of the rows taken from the segments yet: landing writes it with its next rows"
_NOTHING_JUDGED: Final = "the job has judged nothing yet"


@dataclass(frozen=True, slots=True)
class State:
    """A state under test.

    Attributes:
        subject: display name of the state.
        files: Parquet files with the rows of the state.
        about: metadata of the snapshot.
        before_ms: frontier of the previous snapshot, epoch milliseconds; None if there is none.
        chosen: whether its devices may differ from those of the judgements table, see
            `facts.is_chosen`.
    """

    subject: str
    files: tuple[Path, ...]
    about: SnapshotInfo
    before_ms: int | None = None
    chosen: bool = False


def snapshot_state(home: Home, version: int | None = None) -> State | None:
    """Return a snapshot by version, or the newest, as a state; None if there is none."""
    known = [one for one in snapshots(home) if one.is_known]
    for place, one in enumerate(known):
        if one.version is not None and version in (None, one.version):
            older = known[place + 1].frontier_ms if place + 1 < len(known) else None
            chosen = evidence.is_chosen(load_generations(home.lifecycle), one.generation)
            files = delta.files_of_version(home, DEVICE_SNAPSHOTS, one.version)
            return State(f"snapshot {one.version}", files, one, older, chosen)
    return None


class DerivedTables:
    """Tables that are derived when a suite first needs them.

    Args:
        home: the home.
        tables: opened tables; derived ones are added to them.
        judged: position of the job; None if it has judged nothing.
        state: state under test; None if there is none.
        report: callback for progress lines of a replay of bronze.
    """

    def __init__(
        self,
        home: Home,
        tables: OpenedTables,
        judged: EvaluationPoint | None,
        state: State | None,
        report: ReportProgress = silent,
    ) -> None:
        self.tables, self._report = tables, report
        self._home, self._judged, self._state = home, judged, state
        self._of_state: EvaluationPoint | None = None
        self._known = EMPTY_OUTCOME  # coverage, frontier and policies that follow from bronze up to the state's position
        self._unread = ""  # reason if the position of the state cannot be read
        landed = span(home)
        self._landed_ms = 0 if landed is None else landed[1]
        if judged is not None:
            tables.put("job", one_row({**judged.row(), "landed_before_ms": self._landed_ms + 1}))
        if state is not None:
            self._open(state)

    def _open(self, state: State) -> None:
        self.tables.put_state(state.files)
        try:
            heads = evidence.heads_of(self.tables)
            self._of_state = evidence.state_position(self._home, heads.contexts[0], state.about)
        except DAMAGED as error:
            self._unread = f"the position of the state cannot be read: {error!r}"
            return
        about, self._known = state.about, evidence.by_bronze(self._home, self._of_state.newest_ms)
        facts = {
            "subject": state.subject,
            "key_groups": about.key_groups,
            "devices": heads.devices,
            "contexts": len(heads.contexts),
        }
        stated = {"stated_newest_received_ms": about.newest_ms, "stated_frontier_ms": about.frontier_ms or 0}
        job_ms = None if self._judged is None else self._judged.frontier_ms
        more = {"frontier_before_ms": state.before_ms, "job_frontier_ms": job_ms, "has_chosen_devices": state.chosen}
        agrees = {"follows_from_bronze": evidence.has_same_coverage(heads.contexts[0], self._known)}
        self.tables.put("checked", one_row({**self._of_state.row(), **facts, **stated, **more, **agrees}))

    def skip_reason(self, suite: Suite) -> str:
        """Return the reason to skip a suite; empty if it can be evaluated."""
        if "landing_counts" in suite.reads:
            return "" if self.tables.counted else _NOT_COUNTED
        if "job" in suite.reads and self._judged is None:
            return _NOTHING_JUDGED
        of_state = "state" in suite.reads
        if of_state and self._state is None:
            return "there is no snapshot"
        if of_state and self._unread:
            return ""  # not skipped: `make` raises the error, so that it is reported as a fault
        point = self._of_state if of_state else self._judged
        if suite.needs_replay and point is None:
            return _NOTHING_JUDGED
        return _FROM_NOWHERE if suite.needs_replay and not (point and point.origin) else ""

    def skip_reason_after(self, suite: Suite) -> str:
        """Return the reason to skip a suite if retention removed its rows meanwhile."""
        point = self._of_state if "state" in suite.reads else self._judged
        origin = point.origin if suite.needs_replay and point else None
        return _ROWS_REMOVED if origin and not is_still_complete(self._home, origin) else ""

    def make(self, suite: Suite) -> None:
        """Derive the tables that a suite reads, unless they exist already.

        Raises:
            FleetError: the position of the state cannot be read.
        """
        if "state" in suite.reads and self._unread:
            raise FleetError(self._unread, code="snapshot-position-missing")
        missing = {*suite.reads} - {*self.tables.made}
        if self.tables.counted is not None and "landing_counts" in missing:
            removed = {f"removed_{name}": self.tables.removed.get(name, 0) for name in (MESSAGES.name, QUARANTINE.name)}
            self.tables.put("landing_counts", one_row({**self.tables.counted.numbers(), **removed}))
        if "declared_columns" in missing:
            self.tables.put("declared_columns", evidence.declared_columns(self._home))
        if self._judged is not None and "expected_judgements" in missing:
            self.tables.put("expected_judgements", self._judge_again(self._judged)[0])
        if self._judged is not None and "deadlines" in missing:
            self.tables.put("roaming", evidence.roaming(self.tables, self._judged.context.shards))
            self.tables.put("deadlines", evidence.deadlines(self.tables, self._judged))
        if self._of_state is not None and "pending" in missing:
            self.tables.put("pending", evidence.pending(self.tables))
        if self._of_state is not None and "shards" in missing:
            self.tables.put("shards", self._of_state.shards())
            self.tables.put("roaming", evidence.roaming(self.tables, self._of_state.context.shards))
        if self._of_state is not None and "next_deadlines" in missing:
            self.tables.put("next_deadlines", evidence.next_deadlines(self.tables, self._of_state, self._known))
        if self._of_state is not None and "reserved_rows" in missing:
            self.tables.put("reserved_rows", evidence.reserved_rows(self.tables))
        if self._of_state is not None and "expected_devices" in missing:
            self.tables.put("expected_devices", self._judge_again(self._of_state)[1])

    def _judge_again(self, point: EvaluationPoint) -> tuple[pa.Table, pa.Table]:
        assert point.origin is not None, "skip_reason skips suites without an origin"
        return replay_bronze(self._home, point.newest_ms, point.origin, self._report)
