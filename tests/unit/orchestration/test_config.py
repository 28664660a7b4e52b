"""Configuration of the DAGs: folders of backtests."""

from pathlib import Path

from fleetpulse.orchestration.config import backtest_folder


def test_each_run_id_has_a_folder_of_its_own_below_that_of_backtests() -> None:
    runs = ("manual__1", "a:b", "a-b", "..", ".", "", "x" * 250, "../../x")
    folders = {backtest_folder(Path("/notes"), run).resolve() for run in runs}
    assert len(folders) == len(runs)
    assert all(folder.parent == Path("/notes/backtests") and len(folder.name) < 255 for folder in folders)
