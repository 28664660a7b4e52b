"""Temporary folder of a benchmark."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetpulse.core.errors import FleetError


@contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    """Provide a folder that is removed when the context exits.

    Raises:
        FleetError: the body raised it; the folder is kept for its logs, and the error names it.
    """
    try:
        yield folder
    except FleetError as error:
        error.args = (f'{error}; the logs are kept in "{folder}"; remove it after reading them',)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
