"""Read operators' commands from the spool folder, each exactly once.

A command file is renamed to ``<name>.taken-<segment>``. The rename is durable before the rows of
the command are written to that segment. The file is deleted once the segment is durable. After a
crash, the newest segment shows which commands are durable: it contains their names.
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, cast

import structlog

from fleetpulse.io.home.command_spool import MAX_COMMANDS
from fleetpulse.io.system.fsync import sync_folder

_LOG: Final = structlog.get_logger("bridge")
_TAKEN: Final = re.compile(r"(.+)\.taken-(\d+)")
_ENOUGH: Final = 50_000  # commands of one segment; later files wait for the next segment
Command = tuple[str, str, Mapping[str, Any]]


class Spool:
    """Spool folder of command files.

    Args:
        folder: path of the folder.
        newest: number of this bridge's newest segment. Files taken for it or an earlier segment are
            deleted; all other taken files are put back.
        named: names of the commands in the newest segment; None if the segment is gone. Another
            process of this bridge may have written the segment, with other command files.
    """

    def __init__(self, folder: Path, newest: int, named: Collection[str] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._taken_files: list[Path] = []
        self._stuck: str | None = None
        for path in folder.iterdir():
            match = _TAKEN.fullmatch(path.name)
            if match is None:
                continue
            number = int(match[2])
            if number < newest or (number == newest and (named is None or match[1] in named)):
                path.unlink()
            else:
                path.rename(folder / match[1])

    def take(self, number: int) -> list[Command]:
        """Take the command files for segment ``number``, ordered by name.

        Broken files are moved to ``refused/``.

        Returns:
            File name, topic and payload of each command; empty while commands taken before are not
            yet written.
        """
        if self._taken_files:  # commands taken before are not written yet: the disk refused their segment
            return []
        commands: list[Command] = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                commands += self._take_one(path, number)
            except OSError as error:  # commands taken so far must not get lost
                if self._stuck != path.name:
                    _LOG.error("cannot take a command file; later files wait for it", file=path.name, why=error.strerror)
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
        self._taken_files.append(path.rename(path.with_name(f"{path.name}.taken-{number}")))
        return [(path.name, topic, payload) for topic, payload in found]

    def sync(self) -> None:
        """Make the renames durable; must be called before the segment is written.

        Raises:
            OSError: the disk refuses the sync.
        """
        if self._taken_files:
            sync_folder(self.folder)

    def _refuse(self, path: Path, why: str) -> None:
        refused = self.folder / "refused"
        refused.mkdir(exist_ok=True)
        path.rename(refused / path.name)
        _LOG.error("moved a broken command file to commands/refused", file=path.name, why=why)

    def written(self) -> None:
        """Delete the taken files; their segment is durable."""
        for path in self._taken_files:
            path.unlink(missing_ok=True)
        self._taken_files.clear()


def _read(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    content: Any = json.loads(path.read_bytes())
    items = cast("list[Any]", content) if isinstance(content, list) else [content]
    found: list[tuple[str, Mapping[str, Any]]] = []
    if len(items) > MAX_COMMANDS:
        raise ValueError(f"a command file must have at most {MAX_COMMANDS:,} commands")
    for item in items:
        entry = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
        topic, payload = entry.get("topic"), entry.get("payload")
        if not isinstance(topic, str) or not topic or not isinstance(payload, dict):
            raise ValueError('a command file must contain {"topic": text, "payload": object}, or a list of those')
        found.append((topic, cast("dict[str, Any]", payload)))
    return found
