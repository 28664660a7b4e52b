"""A folder of a benchmark's own."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetpulse.core.errors import FleetError


@contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    """Give a folder that goes with what is done in it.

    Raises:
        FleetError: what was done failed with it; the folder then stays, for the logs in it are named in errors.
    """
    try:
        yield folder
    except FleetError as error:
        error.args = (f'{error}; the logs stay in "{folder}"; remove it when you have read them',)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
