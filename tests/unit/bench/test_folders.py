"""The folder of a benchmark: it goes, but for the logs that an error names."""

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
def test_a_folder_goes_with_what_is_done_in_it(error: BaseException | None, tmp_path: Path) -> None:
    if error:
        with pytest.raises(type(error)):
            _use(tmp_path / "own", error)
    else:
        _use(tmp_path / "own", None)
    assert not (tmp_path / "own").exists()


def test_logs_that_an_error_names_stay(tmp_path: Path) -> None:
    with refused("option-conflict", Misuse, match='^see the logs; .* in "') as caught:
        _use(tmp_path / "own", Misuse("see the logs", code="option-conflict"))
    assert caught.value.exit_code == 2
    assert (tmp_path / "own" / "logs").is_dir()
