"""Judgement sink: a batch is committed once, and a failed commit leaves no file."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable

from fleetpulse.columnar.codec.arrow import to_bytes
from fleetpulse.columnar.fold.judgement_batches import judgements_to_batch
from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta import appender
from fleetpulse.io.delta.log import actions_of
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle import judgement_sink
from fleetpulse.io.lifecycle.judgement_sink import JudgementSink, write_to_files
from fleetpulse.io.tables import tables
from tests.support.refusals import refused

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(), name="a home")]
QUERY = "7a0c"


@pytest.fixture
def home(home: Home) -> Home:
    home.checkpoint.mkdir(parents=True, exist_ok=True)
    (home.checkpoint / "metadata").write_text(json.dumps({"id": QUERY}))
    return home


class Batch:
    """Argument of ``foreachBatch``: numbers of judgements by key group, in rows or in files."""

    def __init__(self, home: Home, rows: Sequence[int] = (), files: Sequence[int] = ()) -> None:
        self._home, self._rows, self._files, self.runs = home, rows, files, 0

    def collect(self) -> list[Any]:
        self.runs += 1
        table = str(self._home.table(JUDGEMENTS.name))
        inline = [SimpleNamespace(judgements=to_bytes(of_two_kinds(count)), files=None) for count in self._rows]
        return inline + [
            SimpleNamespace(judgements=None, files=write_to_files(table, of_two_kinds(count), 3)) for count in self._files
        ]


def of_two_kinds(count: int) -> Any:
    kinds = (JudgementKind.LATE, JudgementKind.TRANSITION)
    return judgements_to_batch(Judgement(kinds[number % 2], f"d{number}", event_time_ms=number) for number in range(count))


def sink(home: Home) -> Any:
    return JudgementSink(home.table(JUDGEMENTS.name), home.checkpoint, 3)


def counts(home: Home) -> dict[str, int]:
    sql = "SELECT kind, count(*) AS n FROM judgements WHERE generation = 3 AND judged_at IS NOT NULL GROUP BY kind"
    return {row["kind"]: row["n"] for row in tables.query(home, sql)}


def files(home: Home) -> int:
    return len(list(home.table(JUDGEMENTS.name).rglob("*.parquet")))


def test_batch_is_one_commit_with_a_file_for_each_kind_and_task(home: Home) -> None:
    write_batch = sink(home)
    write_batch(Batch(home, rows=[4, 6], files=[8]), 0)
    assert counts(home) == {"late": 9, "transition": 9}
    assert files(home) == 4, "a file for each kind of the judgements in rows, and of those in files"
    assert DeltaTable(str(home.table(JUDGEMENTS.name))).transaction_version(QUERY) == 0
    write_batch(Batch(home), 1)
    commits = sorted((home.table(JUDGEMENTS.name) / "_delta_log").glob("*.json"))
    assert [one["txn"]["version"] for one in actions_of(commits[-1]) if "txn" in one] == [1], "a batch without judgements"
    added = [one["add"] for one in actions_of(commits[-2]) if "add" in one]
    assert {one["partitionValues"]["kind"] for one in added} == {"late", "transition"}
    assert sum(json.loads(one["stats"])["numRecords"] for one in added) == 18
    assert all("kind" not in json.loads(one["stats"])["minValues"] for one in added)


def test_batch_that_the_table_has_runs_and_its_judgements_are_dropped(home: Home) -> None:
    sink(home)(Batch(home, rows=[2], files=[2]), 0)
    before = files(home)
    again, later = Batch(home, rows=[2], files=[2]), Batch(home, rows=[2])
    restarted = sink(home)
    restarted(again, 0)
    assert (again.runs, counts(home), files(home)) == (1, {"late": 2, "transition": 2}, before)
    restarted(later, 1)
    assert counts(home) == {"late": 3, "transition": 3}


def test_failed_commit_leaves_no_file_and_a_retry_commits_the_batch(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bool:
        raise OSError(28, "No space left on device")

    write_batch = sink(home)
    for module, name in ((appender, "put_commit"), (judgement_sink, "files_of")):
        batch = Batch(home, rows=[2], files=[2])
        rows = batch.collect()
        with monkeypatch.context() as patched:
            patched.setattr(batch, "collect", lambda rows=rows: rows)
            patched.setattr(module, name, fail)
            with pytest.raises(OSError, match="No space"):
                write_batch(batch, 0)
        assert files(home) == 0, name
    write_batch(Batch(home, rows=[2], files=[2]), 0)
    assert counts(home) == {"late": 2, "transition": 2}


def test_second_job_of_a_query_supersedes_the_first(home: Home) -> None:
    first, second = sink(home), sink(home)
    first(Batch(home, rows=[2]), 0)
    second(Batch(home, rows=[2]), 1)
    with refused("appender-superseded", match=f"another process appends to .* as {QUERY}"):
        first(Batch(home, rows=[2]), 1)
    assert counts(home) == {"late": 2, "transition": 2}
