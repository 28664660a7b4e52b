"""The spool of operators' commands: each is taken once, whatever happens between taking it and having it written.

A file is renamed to ``<name>.taken-<segment>``, and that is durable before its rows go into that segment; it is removed when
the segment is durable. At the next start the newest segment says whether it was: it names the commands whose rows it has.
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, cast

import structlog

from fleetpulse.io.home.command_spool import MOST_COMMANDS
from fleetpulse.io.system.fsync import sync_folder

_LOG: Final = structlog.get_logger("bridge")
_TAKEN: Final = re.compile(r"(.+)\.taken-(\d+)")
_ENOUGH: Final = 50_000  # of one segment; what lies behind them waits for the next one
Command = tuple[str, str, Mapping[str, Any]]


class Spool:
    """One folder of command files.

    Args:
        folder: where they lie.
        newest: the newest segment of ours: what was taken for it or an earlier one is removed, the rest put back.
        named: the commands whose rows the newest segment has: another process of the same bridge may have written it, which had
            not taken what we had. None where it is not there any more.
    """

    def __init__(self, folder: Path, newest: int, named: Collection[str] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._taken: list[Path] = []
        self._stuck: str | None = None
        for path in folder.iterdir():
            taken = _TAKEN.fullmatch(path.name)
            if taken is None:
                continue
            number = int(taken[2])
            if number < newest or (number == newest and (named is None or taken[1] in named)):
                path.unlink()
            else:
                path.rename(folder / taken[1])

    def take(self, number: int) -> list[Command]:
        """Take what lies there, for segment ``number``, in order of the names; broken files go to ``refused/``.

        Returns:
            Name of the file, topic and payload of each command; none while what was taken before is not written yet.
        """
        if self._taken:  # while the disk refuses what was taken, no more is
            return []
        commands: list[Command] = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                commands += self._take_one(path, number)
            except OSError as error:  # what was taken so far must not get lost
                if self._stuck != path.name:
                    _LOG.error("a command file cannot be taken; those after it wait", file=path.name, why=error.strerror)
                self._stuck = path.name
                break
            if len(commands) >= _ENOUGH:
                break
        return commands

    def _take_one(self, path: Path, number: int) -> list[Command]:
        try:
            found = _read(path)
        except (ValueError, RecursionError) as error:
            self._refuse(path, str(error))
            return []
        self._taken.append(path.rename(path.with_name(f"{path.name}.taken-{number}")))
        return [(path.name, topic, payload) for topic, payload in found]

    def sync(self) -> None:
        """Make durable what was taken for which segment; to be called before that segment is written.

        Raises:
            OSError: the disk refuses.
        """
        if self._taken:
            sync_folder(self.folder)

    def _refuse(self, path: Path, why: str) -> None:
        refused = self.folder / "refused"
        refused.mkdir(exist_ok=True)
        path.rename(refused / path.name)
        _LOG.error("a command file is broken and lies in commands/refused now", file=path.name, why=why)

    def written(self) -> None:
        """What was taken is durable."""
        for path in self._taken:
            path.unlink(missing_ok=True)
        self._taken.clear()


def _read(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    content: Any = json.loads(path.read_bytes())
    items = cast("list[Any]", content) if isinstance(content, list) else [content]
    found: list[tuple[str, Mapping[str, Any]]] = []
    if len(items) > MOST_COMMANDS:
        raise ValueError(f"a file has at most {MOST_COMMANDS:,} commands")
    for item in items:
        entry = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
        topic, payload = entry.get("topic"), entry.get("payload")
        if not isinstance(topic, str) or not topic or not isinstance(payload, dict):
            raise ValueError('a command is {"topic": text, "payload": object}, or a list of those')
        found.append((topic, cast("dict[str, Any]", payload)))
    return found
