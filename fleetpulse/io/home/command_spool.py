"""Spool of operators' commands: files that the bridge picks up and timestamps."""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.decode import Rejection, decode
from fleetpulse.core.presence.identities import device_of
from fleetpulse.core.rows import Origin
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write, sync_folder
from fleetpulse.io.system.locks import folder_held
from fleetpulse.io.system.wall_clock import wall_clock_ms

_NUMBER: Final = re.compile(r"(\d{1,18})-")
MAX_COMMANDS: Final = 500_000  # per file: they go into one segment, which has fewer than 2^20 rows
Command = tuple[str, Mapping[str, Any]]  # topic and payload


@contextmanager
def spool_lock(home: Home) -> Iterator[None]:
    """Hold the lock of the spool, for commands that depend on those already spooled.

    Raises:
        FleetError: the folder of commands cannot be written.
    """
    with ExitStack() as turn:
        try:
            home.commands.mkdir(parents=True, exist_ok=True)
            turn.enter_context(folder_held(home.commands))
        except OSError as error:
            raise _unwritable(home, error) from None
        yield


def spool(home: Home, commands: Sequence[Command]) -> None:
    """Write commands to the spool, all or none; the bridge picks them up when it runs.

    Args:
        home: home of the spool.
        commands: topic and payload of each command.

    Raises:
        FleetError: a command is invalid, there are too many, or the spool cannot be written. No
            command is spooled.
    """
    with spool_lock(home):
        spool_locked(home, commands)


def spool_locked(home: Home, commands: Sequence[Command]) -> None:
    """Write commands to the spool like `spool`, for a caller that holds `spool_lock`.

    Args:
        home: home of the spool.
        commands: topic and payload of each command.

    Raises:
        FleetError: see `spool`.
    """
    content = file_content(commands)
    name = _new_name(home)
    try:
        atomic_write(home.commands / name, content, temporary=home.commands / f".{name}.new")
    except OSError as error:
        raise _unwritable(home, error) from None


def file_content(commands: Sequence[Command]) -> str:
    """Return commands as the content of a file of the spool.

    Raises:
        FleetError: a command is invalid, or there are too many.
    """
    if len(commands) > MAX_COMMANDS:
        advice = "split them into several calls"
        raise FleetError(
            f"at most {MAX_COMMANDS:,} commands are accepted at once; got {len(commands):,}; {advice}", code="commands-too-many"
        )
    faults: list[str] = []
    for topic, payload in commands:
        row = decode(topic, json.dumps(payload).encode(), wall_clock_ms(), Origin.COMMAND)
        if isinstance(row, Rejection):
            faults.append(row.detail)
    if faults:
        raise FleetError("; ".join(faults[:20]), code="commands-faulty")
    return json.dumps([{"topic": topic, "payload": payload} for topic, payload in commands])


def spool_file(home: Home, prepared: Path) -> None:
    """Move a durable file with the content of `file_content` to the spool: it is in one of the two places at any time.

    Args:
        home: home of the spool.
        prepared: the file, on the file system of the home.

    Raises:
        FleetError: the spool cannot be written.
    """
    with spool_lock(home):
        try:
            prepared.rename(home.commands / _new_name(home))
            sync_folder(home.commands)
            sync_folder(prepared.parent)
        except OSError as error:
            raise _unwritable(home, error) from None


def _new_name(home: Home) -> str:
    return f"{max(wall_clock_ms(), _newest(home) + 1)}-{secrets.token_hex(4)}.json"


def _unwritable(home: Home, error: OSError) -> FleetError:
    advice = "free disk space, or make the folder writable for this user, and try again"
    return FleetError(f'cannot write to "{home.commands}" ({error.strerror}); {advice}', code="commands-unwritable")


def _newest(home: Home) -> int:
    """Return the greatest file number in the spool; 0 if it is empty.

    The bridge reads the files in the order of their numbers, even if the clock was set back.
    """
    return max((int(found[1]) for path in home.commands.glob("*.json*") if (found := _NUMBER.match(path.name))), default=0)


def devices_with_pending_commands(home: Home) -> set[str]:
    """Return the devices with commands that the bridge has not picked up yet."""
    identity = home.identity()
    return {device_id for topic in spooled(home) if (device_id := device_of(topic, identity)) is not None}


def spooled(home: Home, *, include_taken: bool = False) -> set[str]:
    """Return the topics of commands in the spool.

    Args:
        home: home of the spool.
        include_taken: whether commands are included that the bridge has picked up, but not yet written to a
            segment.
    """
    found: set[str] = set()
    paths = [*home.commands.glob("*.json"), *(home.commands.glob("*.json.taken-*") if include_taken else ())]
    for path in paths:  # temporary files of a process that was killed are excluded
        try:
            content = json.loads(path.read_text())
            found |= {str(command["topic"]) for command in (content if isinstance(content, list) else [content])}
        except (OSError, ValueError, LookupError, TypeError):
            continue  # picked up by the bridge meanwhile, or not a valid file
    return found
