"""Quality gate: rows that executors wrote and this process does not find are an error."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batch.quality.gate import require_all_rows
from tests.support.refusals import refused


def test_rows_that_executors_wrote_and_that_are_not_found_are_an_error(tmp_path: Path) -> None:
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for file in files:
        pq.write_table(pa.table({"device_id": ["one", "two"]}), file)
    require_all_rows(files, 4)
    require_all_rows([], 0)
    for found in (files[:1], []):
        with refused("written-rows-missing"):
            require_all_rows(found, 4)
