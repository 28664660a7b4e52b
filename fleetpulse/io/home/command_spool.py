"""The spool of operators' commands: written whole, taken by the bridge, which stamps them."""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.decode import Rejection, decode
from fleetpulse.core.presence.identities import device_of
from fleetpulse.core.rows import Origin
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.system.locks import folder_held
from fleetpulse.io.system.wall_clock import wall_clock_ms

_NUMBER: Final = re.compile(r"(\d{1,18})-")
MOST_COMMANDS: Final = 500_000  # of one file: they go into one segment, which has fewer than 2^20 rows
Command = tuple[str, Mapping[str, Any]]  # topic and payload


@contextmanager
def in_turn(home: Home) -> Iterator[None]:
    """Let nobody else give commands meanwhile: for those that follow from what has been said so far.

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
    """Hand commands to the bridge, all of them or none; it takes them when it runs.

    Raises:
        FleetError: one of them is not a command, or they are too many; nothing was written.
    """
    with in_turn(home):
        hand_over(home, commands)


def hand_over(home: Home, commands: Sequence[Command]) -> None:
    """Do what `spool` does, for one whose turn it is.

    Raises:
        FleetError: as `spool`.
    """
    if len(commands) > MOST_COMMANDS:
        cure = "give them in parts, one after the other"
        raise FleetError(
            f"at most {MOST_COMMANDS:,} commands are given at once; got {len(commands):,}; {cure}", code="commands-too-many"
        )
    faults: list[str] = []
    for topic, payload in commands:
        row = decode(topic, json.dumps(payload).encode(), wall_clock_ms(), Origin.COMMAND)
        if isinstance(row, Rejection):
            faults.append(row.detail)
    if faults:
        raise FleetError("; ".join(faults[:20]), code="commands-faulty")
    name = f"{max(wall_clock_ms(), _newest(home) + 1)}-{secrets.token_hex(4)}.json"
    content = json.dumps([{"topic": topic, "payload": payload} for topic, payload in commands])
    try:
        atomic_write(home.commands / name, content, aside=home.commands / f".{name}.new")
    except OSError as error:
        raise _unwritable(home, error) from None


def _unwritable(home: Home, error: OSError) -> FleetError:
    cure = "free some space, or make it yours to write, and try again"
    return FleetError(f'cannot write to "{home.commands}" ({error.strerror}); {cure}', code="commands-unwritable")


def _newest(home: Home) -> int:
    """Return the greatest number of the spool: commands are taken in the order of their names, whatever the clock says."""
    return max((int(found[1]) for path in home.commands.glob("*.json*") if (found := _NUMBER.match(path.name))), default=0)


def commanded(home: Home) -> set[str]:
    """Return the devices of commands that nobody has taken yet."""
    identity = home.identity()
    return {device_id for topic in spooled(home) if (device_id := device_of(topic, identity)) is not None}


def spooled(home: Home, *, taken: bool = False) -> set[str]:
    """Return the topics of commands that lie in the spool.

    Args:
        home: the home.
        taken: those too that the bridge has taken for a segment that it has still to write.
    """
    found: set[str] = set()
    paths = [*home.commands.glob("*.json"), *(home.commands.glob("*.json.taken-*") if taken else ())]
    for path in paths:  # not what somebody who was killed had only begun to hand over
        try:
            content = json.loads(path.read_text())
            found |= {str(command["topic"]) for command in (content if isinstance(content, list) else [content])}
        except (OSError, ValueError, LookupError, TypeError):
            continue  # taken while we looked, or not ours to judge
    return found
