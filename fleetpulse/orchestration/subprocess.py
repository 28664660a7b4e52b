"""One verb of the command as a process in a group of its own, without Airflow.

Rule 1: whatever ends the wait, an error, a timeout or a signal, the group does not outlive it; a verb that ended by itself may
leave others running, as the one does that starts the stream.
Rule 2: what a verb writes is bounded in memory, however much it is, and each line is handed on at once. Who wants all of it
says how much that may be, and gets whole lines, or none and that it was too long.
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

from fleetpulse.io.system.process import ASKED_BY, ending_with_parent

SENTENCE: Final = "fleet: "  # with it begins what a verb says of a refusal
STOP_S: Final = 30.0
_LOOK_S: Final = 0.2
_KEPT_LINES: Final = 1_000
_CHUNK: Final = 65_536


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """How a verb ended.

    Attributes:
        code: its exit code; negative where a signal ended it.
        out: the newest lines of standard output; where all are kept, all.
        told: the newest lines of standard error.
        refusal: its own sentence, and what follows it; empty where it said none.
        too_long: whether standard output was longer than what is kept of it; ``out`` is empty then.
    """

    code: int
    out: tuple[str, ...]
    told: tuple[str, ...]
    refusal: tuple[str, ...]
    too_long: bool = False

    @property
    def refused(self) -> bool:
        """Whether it said why it does not do it: given again, it would say the same."""
        return self.code in (1, 2) and bool(self.refusal)

    def reason(self) -> str:
        """Return why it failed; the first line is its own sentence, where it said one."""
        if self.refusal:
            return "\n".join(self.refusal)
        ending = f"ended by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"
        return "\n".join([ending + (f": {self.told[-1]}" if self.told else ", and said nothing"), *self.told[-20:]])


class Verb:
    """A running verb.

    Args:
        line: program and words.
        say: is given each line as it comes, of a long one the beginning.
        keep_bytes: so much of standard output is kept, in whole lines; None keeps the newest lines, and long ones in pieces.
        environment: its own; None gives it ours without what is Airflow's.
        asked_by: who asks for it, which it writes down; empty where that is its user.
    """

    def __init__(
        self,
        line: Sequence[str],
        say: Callable[[str], None],
        *,
        keep_bytes: int | None = None,
        environment: Mapping[str, str] | None = None,
        asked_by: str = "",
    ) -> None:
        self._say = say
        self._keep_bytes, self._kept_bytes = keep_bytes, 0
        self._out: deque[str] = deque(maxlen=_KEPT_LINES if keep_bytes is None else None)
        self._told: deque[str] = deque(maxlen=_KEPT_LINES)
        self._refusal: list[str] = []
        self.process = subprocess.Popen(
            ending_with_parent(line),  # Linux ends it when the worker dies, even by kill -9; elsewhere it goes on to its end
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**(_without_airflow() if environment is None else environment), **({ASKED_BY: asked_by} if asked_by else {})},
            start_new_session=True,
        )

    def wait(self) -> ProcessResult:
        """Wait for its end; whatever breaks the wait off stops the group."""
        try:
            with selectors.DefaultSelector() as ready:
                out, told = _Lines(self._take_out, self._keep_bytes or _CHUNK), _Lines(self._take_told, _CHUNK)
                for pipe, lines in ((self.process.stdout, out), (self.process.stderr, told)):
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
        return ProcessResult(self.process.returncode, tuple(self._out), tuple(self._told), tuple(self._refusal), self._too_long)

    @property
    def _too_long(self) -> bool:
        return self._keep_bytes is not None and self._kept_bytes > self._keep_bytes

    def _read(self, ready: selectors.BaseSelector) -> None:
        """Read until it has ended; one that it leaves running may keep the pipes open."""
        ended = False
        while True:
            found = ready.select(0 if ended else _LOOK_S)
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
        """Ask the group to end, and end it after ``patience_s``; no effect where the verb has ended."""
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
        self._say(line if len(line) <= _CHUNK else f"{line[:_CHUNK]} ...")

    def _take_told(self, line: str) -> None:
        self._told.append(line)
        if line.startswith(SENTENCE) or self._refusal:
            self._refusal = [*self._refusal, line.removeprefix(SENTENCE)][:50]
        self._say(line)


class _Lines:
    """Makes lines of what a pipe gives; one that is longer than ``longest`` bytes is handed on in pieces."""

    def __init__(self, take: Callable[[str], None], longest: int) -> None:
        self._take = take
        self._longest = longest
        self._rest = bytearray()

    def read(self, pipe: int) -> bool:
        """Take what is there; False at the end."""
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
        """Take what is left without a line's end."""
        if self._rest:
            self._take(self._rest.decode(errors="replace"))
        self._rest.clear()


def _without_airflow() -> dict[str, str]:
    """Return our environment without what is Airflow's: its secrets are not the verb's."""
    return {name: value for name, value in os.environ.items() if "AIRFLOW" not in name}


def _to_group(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        pass  # all of it has ended; macOS answers the latter for a group of the dead
