"""Read operators' commands from the spool folder, each exactly once.

A command file is renamed to ``<name>.taken-<segment>``. The rename is durable before the rows of
the command are written to that segment. The file is deleted once the segment is durable, or moved to
`DELIVERY` if it has commands to devices. If the disk refuses that, it is tried again. After a crash, the newest
segment shows which commands are durable: it contains their names.
"""

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import structlog

from fleetpulse.core.streams.commands import COMMAND
from fleetpulse.io.home.command_spool import MAX_COMMANDS
from fleetpulse.io.system.fsync import sync_folder

_LOG: Final = structlog.get_logger("bridge")
_TAKEN: Final = re.compile(r"(.+)\.taken-(\d+)")
DELIVERY: Final = "delivery"  # folder below that of the spool: commands to devices whose segment is durable
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
        self._taken_files: dict[Path, bool] = {}  # whether a file has commands to devices
        self._durable: dict[Path, bool] = {}  # like `_taken_files`; the segment of these is written
        self._refused_by_disk = False
        self._stuck: str | None = None
        for path in folder.iterdir():
            match = _TAKEN.fullmatch(path.name)
            if match is None:
                continue
            number = int(match[2])
            if number < newest or (number == newest and (named is None or match[1] in named)):
                self._durable[path] = _has_commands_to_devices(path)
            else:
                path.rename(folder / match[1])
        self.finish()

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
        taken = path.rename(path.with_name(f"{path.name}.taken-{number}"))
        self._taken_files[taken] = any(payload.get("op") == COMMAND for _, payload in found)
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

    def written(self) -> bool:
        """Delete the taken files, or move them to `DELIVERY`; their segment is durable.

        Returns:
            Whether there are new commands to deliver.
        """
        self._durable |= self._taken_files
        self._taken_files = {}
        return self.finish()

    def finish(self) -> bool:
        """Delete or move the files of durable commands; those that the disk refuses are left to the next call.

        Returns:
            Whether there are new commands to deliver.
        """
        moved = refused = False
        for path, for_devices in [*self._durable.items()]:
            try:
                with suppress(FileNotFoundError):  # removed by somebody else
                    self._finish(path, for_devices=for_devices)
            except OSError as error:
                refused = True
                if not self._refused_by_disk:
                    _LOG.error("cannot move or delete a command file; trying again", file=path.name, why=error.strerror)
            else:
                del self._durable[path]
                moved |= for_devices
        self._refused_by_disk = refused
        return moved

    def _finish(self, taken: Path, *, for_devices: bool) -> None:
        if for_devices:
            (self.folder / DELIVERY).mkdir(exist_ok=True)
            taken.rename(self.folder / DELIVERY / taken.name.rpartition(".taken-")[0])
        else:
            taken.unlink()


def _has_commands_to_devices(path: Path) -> bool:
    try:
        return any(payload.get("op") == COMMAND for _, payload in _read(path))
    except (ValueError, RecursionError):
        return False


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
