"""Run one verb of the command as a process in its own process group.

This module does not depend on Airflow.

Rule 1: the group ends when the wait is interrupted by an error, a timeout or a signal. A verb that
ends normally may leave processes running, as the verb that starts the stream does.
Rule 2: memory for the verb's output is bounded, and each line is forwarded at once. A caller that
needs the whole output sets a byte limit. Beyond the limit the output is dropped and flagged as too
long.
"""

import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fleetpulse.io.system.process import REQUESTED_BY_VARIABLE, command_with_parent_death_signal

ERROR_PREFIX: Final = "fleet: "  # prefix of a verb's error message
STOP_S: Final = 30.0
_POLL_S: Final = 0.2
_KEPT_LINES: Final = 1_000
_CHUNK: Final = 65_536


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """Result of a verb.

    Attributes:
        code: exit code; negative if a signal ended the verb.
        out: newest lines of standard output; all lines if a byte limit is set.
        stderr: newest lines of standard error.
        refusal: error message of the verb and the lines after it; empty if it printed none.
        too_long: whether standard output exceeded the byte limit; ``out`` is then empty.
    """

    code: int
    out: tuple[str, ...]
    stderr: tuple[str, ...]
    refusal: tuple[str, ...]
    too_long: bool = False

    @property
    def refused(self) -> bool:
        """Whether the verb exited with 1 or 2 and an error message: a retry cannot help."""
        return self.code in (1, 2) and bool(self.refusal)

    def reason(self) -> str:
        """Return the reason of the failure; the first line is the error message, if any."""
        if self.refusal:
            return "\n".join(self.refusal)
        ending = f"ended by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"
        return "\n".join([ending + (f": {self.stderr[-1]}" if self.stderr else " without an error message"), *self.stderr[-20:]])


class Verb:
    """Running process of a verb.

    Args:
        line: program and arguments.
        report: callback for each line of output; long lines are truncated.
        keep_bytes: byte limit up to which standard output is kept in whole lines; None to keep the
            newest lines only, long ones in pieces.
        environment: environment of the process; None for the present one without variables of
            Airflow.
        asked_by: name of the requester, which the verb records; empty for the user of the process.
    """

    def __init__(
        self,
        line: Sequence[str],
        report: Callable[[str], None],
        *,
        keep_bytes: int | None = None,
        environment: Mapping[str, str] | None = None,
        asked_by: str = "",
    ) -> None:
        self._report = report
        self._keep_bytes, self._kept_bytes = keep_bytes, 0
        self._out: deque[str] = deque(maxlen=_KEPT_LINES if keep_bytes is None else None)
        self._error_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._refusal: list[str] = []
        self.process = subprocess.Popen(
            command_with_parent_death_signal(line),  # Linux ends it when the worker dies, even by kill -9; other systems do not
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **(_without_airflow() if environment is None else environment),
                **({REQUESTED_BY_VARIABLE: asked_by} if asked_by else {}),
            },
            start_new_session=True,
        )

    def wait(self) -> ProcessResult:
        """Wait until the verb ends; stop the group if the wait is interrupted."""
        try:
            with selectors.DefaultSelector() as ready:
                out, err = _Lines(self._take_out, self._keep_bytes or _CHUNK), _Lines(self._take_error_line, _CHUNK)
                for pipe, lines in ((self.process.stdout, out), (self.process.stderr, err)):
                    assert pipe is not None
                    os.set_blocking(pipe.fileno(), False)
                    ready.register(pipe.fileno(), selectors.EVENT_READ, lines)
                self._read(ready)
        except BaseException:
            self.stop()
            raise
        finally:
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()
        return ProcessResult(
            self.process.returncode, tuple(self._out), tuple(self._error_lines), tuple(self._refusal), self._too_long
        )

    @property
    def _too_long(self) -> bool:
        return self._keep_bytes is not None and self._kept_bytes > self._keep_bytes

    def _read(self, ready: selectors.BaseSelector) -> None:
        """Read until the verb has ended, even if a process left running holds the pipes."""
        ended = False
        while True:
            found = ready.select(0 if ended else _POLL_S)
            for key, _ in found:
                if not key.data.read(key.fd):
                    ready.unregister(key.fd)
            if ended and not found:
                break
            ended = self.process.poll() is not None
            if not ended and not ready.get_map():
                self.process.wait()
        for key in ready.get_map().values():
            key.data.end()

    def stop(self, patience_s: float = STOP_S) -> None:
        """Send SIGTERM to the group, then SIGKILL after ``patience_s``.

        No effect if the verb has ended.
        """
        if self.process.poll() is not None:
            return
        _to_group(self.process.pid, signal.SIGTERM)
        limit_s = time.monotonic() + patience_s
        while self.process.poll() is None and time.monotonic() < limit_s:
            time.sleep(0.05)
        _to_group(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _take_out(self, line: str) -> None:
        self._kept_bytes += len(line.encode())
        self._out.append(line)
        if self._too_long:
            self._out.clear()
        self._report(line if len(line) <= _CHUNK else f"{line[:_CHUNK]} ...")

    def _take_error_line(self, line: str) -> None:
        self._error_lines.append(line)
        if line.startswith(ERROR_PREFIX) or self._refusal:
            self._refusal = [*self._refusal, line.removeprefix(ERROR_PREFIX)][:50]
        self._report(line)


class _Lines:
    """Split bytes of a pipe into lines; lines above ``longest`` bytes are emitted in pieces."""

    def __init__(self, take: Callable[[str], None], longest: int) -> None:
        self._take = take
        self._longest = longest
        self._rest = bytearray()

    def read(self, pipe: int) -> bool:
        """Read the available bytes; return False at the end of the pipe."""
        try:
            chunk = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return True
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            self._rest += line
            self._take(self._rest.decode(errors="replace").rstrip("\r"))
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > self._longest or not chunk:
            self.end()
        return bool(chunk)

    def end(self) -> None:
        """Emit the rest of the bytes, which has no line end."""
        if self._rest:
            self._take(self._rest.decode(errors="replace"))
        self._rest.clear()


def _without_airflow() -> dict[str, str]:
    """Return the present environment without Airflow's variables, which hold secrets."""
    return {name: value for name, value in os.environ.items() if "AIRFLOW" not in name}


def _to_group(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        pass  # the group has ended; macOS raises PermissionError for zombies
