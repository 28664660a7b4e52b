"""Check of the permissions of files in which users store secrets.

Rule: a file of this user that group or others can read is refused, unless only its owner can enter
its folder. A file of another user, such as a secret that is mounted into a container, is that
user's responsibility.
"""

import os
import re
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError

SENSITIVE_WORDS: Final = r"passw|passphrase|secret|jaas|token|credential|private|api_?key|\.key(?![\w.])"  # a regular expression
SECRET_NAME: Final = re.compile(SENSITIVE_WORDS, re.IGNORECASE)  # of an option or argument
_READ: Final = 0o044
_ENTER: Final = 0o011


def exposed_secret(path: Path, what: str, file: os.stat_result, folder: os.stat_result, user: int) -> FleetError | None:
    """Return the error for a file whose secret other users can read; None if they cannot.

    Args:
        path: path of the file, for the error.
        what: name of the secret, for the error.
        file: status of the file.
        folder: status of its folder.
        user: effective id of this user.
    """
    if file.st_uid != user or not file.st_mode & _READ or not folder.st_mode & _ENTER:
        return None
    return FleetError(
        f'"{path}" contains {what}, and other users of the machine can read it (mode {file.st_mode & 0o777:03o}); expected a '
        f'file that only its owner can read; run: chmod 600 "{path}"',
        code="secret-exposed",
    )
