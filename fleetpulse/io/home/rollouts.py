"""Firmware rollouts of a home: records, devices, and commands that wait for the spool.

A rollout is a folder ``rollouts/NAME`` of the home:

- ``rollout.json``, its record (`core.rollouts.rollout`), replaced atomically;
- ``devices.json``, the ids and sites of its devices, written once, before the record;
- ``commands-N.json``, the commands of the newest cohort, until they are in the spool.

Rule 1: the commands of a cohort are durable before the record names the cohort. Then each file is renamed into the spool, so
it is in one of the two places. A step that was interrupted continues from the remaining files: no command is sent twice, and
none is forgotten.
Rule 2: files of commands without a cohort in the record belong to a step that did not happen. The next step replaces them.
Rule 3: `rollouts_lock` is held over a step.

Source: ADR 49.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.rollouts.rollout import Rollout, from_plain
from fleetpulse.io.home.command_spool import Command, file_content, spool_file
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write, sync_folder
from fleetpulse.io.system.locks import folder_held

UPDATE: Final = "update"  # ``op`` of a control row that announces an update
MAX_IN_FILE: Final = 100_000  # commands in a file, below `command_spool.MAX_COMMANDS`
Device = tuple[str, str]  # id and site


@contextmanager
def rollouts_lock(home: Home) -> Iterator[None]:
    """Hold the lock of the rollouts of a home; wait for it.

    Raises:
        FleetError: the folder cannot be written.
    """
    with ExitStack() as turn:
        try:
            _folder(home).mkdir(exist_ok=True)
            turn.enter_context(folder_held(_folder(home)))
        except OSError as error:
            raise _unwritable(_folder(home), error) from None
        yield


def rollout_names(home: Home) -> list[str]:
    """Return the names of the rollouts of a home, in order."""
    return sorted(path.parent.name for path in _folder(home).glob("*/rollout.json"))


class StoredRollout:
    """Folder of one rollout.

    Args:
        home: home of the rollout.
        name: name of the rollout, as in its plan.
    """

    def __init__(self, home: Home, name: str) -> None:
        self._home, self._name = home, name
        self._folder = _folder(home) / name

    def find(self) -> Rollout | None:
        """Return the record; None if there is no such rollout.

        Raises:
            FleetError: the record is damaged or cannot be read.
        """
        try:
            content = json.loads((self._folder / "rollout.json").read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._damaged(error) from None
        return from_plain(content)

    def read(self) -> Rollout:
        """Return the record.

        Raises:
            FleetError: there is no such rollout, or its record is damaged.
        """
        if (found := self.find()) is None:
            known = ", ".join(rollout_names(self._home)) or "none"
            raise FleetError(
                f'there is no rollout "{self._name}" in "{self._home.path}"; known are: {known}; start it with: '
                f"./fleet rollout start",
                code="rollout-unknown",
            )
        return found

    def devices(self) -> list[Device]:
        """Return the devices of the rollout, ordered by id.

        Raises:
            FleetError: the file of devices is damaged or cannot be read.
        """
        try:
            return [(str(device_id), str(site)) for device_id, site in json.loads((self._folder / "devices.json").read_text())]
        except (OSError, ValueError, TypeError) as error:
            raise self._damaged(error) from None

    def create(self, devices: Sequence[Device]) -> None:
        """Write the devices of a rollout without a record.

        Raises:
            FleetError: the folder cannot be written.
        """
        self._make_folder()
        self._write("devices.json", json.dumps(devices))

    def write(self, rollout: Rollout) -> None:
        """Replace the record.

        Raises:
            FleetError: the folder cannot be written.
        """
        self._write("rollout.json", json.dumps(rollout.plain(), indent=1))

    def prepare(self, commands: Sequence[Command]) -> None:
        """Write the commands of a step, in place of those of a step that did not happen.

        Raises:
            FleetError: a command is invalid, or the folder cannot be written.
        """
        parts = [commands[at : at + MAX_IN_FILE] for at in range(0, len(commands), MAX_IN_FILE)]
        contents = [file_content(part) for part in parts]
        self.discard()
        for number, content in enumerate(contents):
            self._write(f"commands-{number:03}.json", content)

    def renew(self, until_ms: int) -> None:
        """Replace the announced end of updates in the prepared commands: the step was interrupted before they were sent.

        Args:
            until_ms: end, epoch milliseconds.

        Raises:
            FleetError: a file is damaged, or the folder cannot be written.
        """
        for path in self._prepared():
            try:
                commands = json.loads(path.read_text())
                for command in commands:
                    if command["payload"]["op"] == UPDATE:
                        command["payload"]["until"] = until_ms
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise self._damaged(error) from None
            self._write(path.name, json.dumps(commands))

    def waiting(self) -> int:
        """Return the number of files of commands that are not in the spool yet."""
        return len(self._prepared())

    def send(self) -> None:
        """Move the prepared commands into the spool, those that are not there yet.

        Raises:
            FleetError: the spool cannot be written.
        """
        for path in self._prepared():
            spool_file(self._home, path)

    def discard(self) -> None:
        """Remove the prepared commands that are not in the spool yet.

        Raises:
            FleetError: the folder cannot be written.
        """
        try:
            for path in reversed(self._prepared()):
                path.unlink()
            if self._folder.exists():
                sync_folder(self._folder)
        except OSError as error:
            raise _unwritable(self._folder, error) from None

    def _prepared(self) -> list[Path]:
        return sorted(self._folder.glob("commands-*.json"))

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            sync_folder(self._folder.parent)
        except OSError as error:
            raise _unwritable(self._folder, error) from None

    def _write(self, name: str, content: str) -> None:
        try:
            atomic_write(self._folder / name, content)
        except OSError as error:
            raise _unwritable(self._folder, error) from None

    def _damaged(self, error: Exception) -> FleetError:
        return FleetError(
            f'the rollout "{self._folder}" is damaged ({error}); restore its folder from a backup', code="rollout-record-damaged"
        )


def _folder(home: Home) -> Path:
    return home.path / "rollouts"


def _unwritable(folder: Path, error: OSError) -> FleetError:
    advice = "free disk space, or make the folder writable for this user, and try again"
    return FleetError(f'cannot write to "{folder}" ({error.strerror}); {advice}', code="rollout-unwritable")
