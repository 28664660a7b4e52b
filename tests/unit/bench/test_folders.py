"""Temporary folder of a benchmark: it is removed at the end, except logs that an error names."""

from pathlib import Path

import pytest

from bench.folders import own_folder
from fleetpulse.core.errors import Misuse
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def _use(folder: Path, error: BaseException | None) -> None:
    with own_folder(folder):
        (folder / "logs").mkdir(parents=True)
        if error:
            raise error


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), ValueError()])
def test_the_folder_is_removed_at_the_end_of_the_benchmark(error: BaseException | None, tmp_path: Path) -> None:
    if error:
        with pytest.raises(type(error)):
            _use(tmp_path / "own", error)
    else:
        _use(tmp_path / "own", None)
    assert not (tmp_path / "own").exists()


def test_the_logs_are_kept_if_an_error_names_them(tmp_path: Path) -> None:
    with refused("option-conflict", Misuse, match='^see the logs; .* in "') as caught:
        _use(tmp_path / "own", Misuse("see the logs", code="option-conflict"))
    assert caught.value.exit_code == 2
    assert (tmp_path / "own" / "logs").is_dir()
