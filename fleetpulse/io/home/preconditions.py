"""Read-only checks of a home and its machine: owner, clocks, file modes of secrets.

Rule: a check works while the home runs, and before the home exists.
"""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.operations.secret_files import exposed_secret
from fleetpulse.core.times import format_duration, format_instant
from fleetpulse.io.home.home import Home

_SLACK_S: Final = 60.0  # tolerance: hosts that share a file system, or a clock that was just corrected
_LEVELS: Final = 2  # folders below the home whose entries are read: status files, logs, and folders of data
_SECRETS: Final = (  # patterns of the files that fleetpulse writes with mode 600
    "broker/*.conf",
    "broker/*.key",
    "broker/*.session",
    "broker/access.json",
    "broker/credentials.json",
    "broker/tls.json",
    "run/broker.json",
    "web/session.key",
    "web/tokens.json",
    "airflow/*.secret",
    "airflow/passwords.json",
    "airflow/fleet/pages.key",
)


def existing_folder(home: Home) -> Path:
    """Return the folder of a home, or the nearest existing one above it before it is created."""
    return next(folder for folder in (home.path.absolute(), *home.path.absolute().parents) if folder.is_dir())


def require_own(home: Home) -> None:
    """Check that this user can write to a home's folder, and owns an existing home.

    Raises:
        FleetError: another user owns the home, or this user cannot write to it.
    """
    folder = existing_folder(home)
    owner, user = folder.stat().st_uid, os.geteuid()
    if home.exists() and owner != user:
        raise FleetError(
            f'the home "{home.path}" belongs to user {owner}; this process runs as user {user}; run all processes of a home, and '
            f"the workers of its Spark cluster, as its owner",
            code="home-of-another-user",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FleetError(
            f'the folder "{folder}" cannot be written by user {user}; make it writable for this user, or choose another home '
            f"with --home",
            code="home-unwritable",
        )


def require_clock(home: Home, now_s: float | None = None) -> str:
    """Compare this machine's clock with the file system's, and with the newest file of the home.

    Args:
        home: the home.
        now_s: epoch seconds; None reads the clock.

    Returns:
        Description of the comparison.

    Raises:
        FleetError: the clock differs from the file system's by over a minute, or is over a minute
            behind the newest file.
    """
    folder = existing_folder(home)
    now_s = time.time() if now_s is None else now_s
    with NamedTemporaryFile(prefix=".clock-", dir=folder) as fresh:
        fresh.write(b"now")
        fresh.flush()
        written_s = os.fstat(fresh.fileno()).st_mtime
    if abs(written_s - now_s) > _SLACK_S:
        relation = "behind" if written_s > now_s else "ahead of"
        raise FleetError(
            f"the clock of this machine is {_text(abs(written_s - now_s))} {relation} that of "
            f'the file system of "{folder}"; expected at most {_text(_SLACK_S)}; synchronise both (NTP)',
            code="clock-differs",
        )
    if not home.exists():
        return "equal to that of the file system"
    newest_s, path = max((changed, path) for path, changed in _changes(home.path, _LEVELS))
    if newest_s - now_s > _SLACK_S:
        raise FleetError(
            f'the clock of this machine is {_text(newest_s - now_s)} behind the newest file of the home, "{path}"; expected no '
            f"file from the future; synchronise the clock (NTP), or wait if it was ahead when the file was written",
            code="clock-behind",
        )
    return f"after the newest file, of {format_instant(round(newest_s * 1000))}"


def _text(seconds: float) -> str:
    return format_duration(round(seconds) * 1000)


def _changes(folder: Path, levels: int) -> Iterator[tuple[Path, float]]:
    """Yield paths and their modification times, epoch seconds; a folder's changes with its entries."""
    yield folder, folder.stat().st_mtime
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False) and levels > 1:
                    yield from _changes(Path(entry.path), levels - 1)
                else:
                    yield Path(entry.path), entry.stat(follow_symlinks=False).st_mtime
            except FileNotFoundError:
                continue  # a temporary file of a running process


def require_private_secrets(home: Home, more: Iterable[Path] = ()) -> int:
    """Check that other users cannot read the secrets of a home; return the number of files.

    Args:
        home: the home.
        more: files of secrets that its settings name.

    Raises:
        FleetError: other users can read a secret; the error names the first such file.
    """
    found = [path for pattern in _SECRETS for path in sorted(home.path.glob(pattern))]
    count = 0
    for path in (*found, *more):
        try:
            file, folder = path.stat(), path.absolute().parent.stat()
        except FileNotFoundError:
            continue  # replaced, or reported by the check of the settings
        count += 1
        if (exposed := exposed_secret(path, "a secret", file, folder, os.geteuid())) is not None:
            raise exposed
    return count
