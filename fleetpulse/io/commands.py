"""The spool of operators' commands: written whole, taken by the bridge, which stamps them."""

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fleetpulse.core.decoding import Rejection, decode
from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages import Origin
from fleetpulse.io.home import Home

Command = tuple[str, Mapping[str, Any]]  # topic and payload


def spool(home: Home, commands: Sequence[Command]) -> None:
    """Hand commands to the bridge, all of them or none; it takes them when it runs.

    Raises:
        FleetError: one of them is not a command; nothing was written.
    """
    faults: list[str] = []
    for topic, payload in commands:
        row = decode(topic, json.dumps(payload).encode(), int(time.time() * 1000), Origin.COMMAND)
        if isinstance(row, Rejection):
            faults.append(row.detail)
    if faults:
        raise FleetError("; ".join(faults[:20]))
    name = f"{int(time.time() * 1000)}-{secrets.token_hex(4)}.json"
    fresh = home.commands / f".{name}.new"
    try:
        home.commands.mkdir(parents=True, exist_ok=True)
        with fresh.open("w") as file:
            json.dump([{"topic": topic, "payload": payload} for topic, payload in commands], file)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(home.commands / name)
    except OSError as error:
        raise FleetError(
            f'cannot write to "{home.commands}" ({error.strerror}); free some space, or make it yours to write, and try again'
        ) from None


def commanded(home: Home) -> set[str]:
    """Return the devices of commands that nobody has taken yet."""
    return {levels[2] for topic in spooled(home) if len(levels := topic.split("/")) > 2}


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
