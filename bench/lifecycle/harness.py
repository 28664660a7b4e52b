"""Warm process of each contender, and measured runs on them, one at a time.

Rule 1: only one contender's process works during a run.
Rule 2: a measurement starts after the first micro-batch and ends with the commit of the last one.
Flink has no micro-batches: its figures are those of a run over all versions, minus those of a run
over the first version. The time limit applies to both runs together.
"""

import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from bench.lifecycle.batch_parts import BatchParts
from bench.lifecycle.generate import Input
from bench.measure import Reading, Watch, size_bytes
from bench.peers import flink
from fleetpulse.core.errors import FleetError

_POLL_S = 0.005


class DidNotFinish(Exception):
    """A contender exceeded its time limit."""


class Crashed(FleetError):
    """A contender's process failed or ended.

    The first line of the error names the contender and the reason; the other lines are the last
    ones of its log.
    """


@dataclass(frozen=True, slots=True)
class Run:
    """Cost of one run of one contender.

    Attributes:
        messages: number of rows measured.
        wall_s: wall time, seconds.
        cpu_s: CPU time, seconds.
        batch_ms: duration of each measured micro-batch; empty for Flink.
        peak_bytes: peak resident memory of the process tree.
        checkpoint_bytes: size of the checkpoint after the run; 0 if none is left.
        out: folder of the sink.
        parts: parts of each measured micro-batch, see `bench.lifecycle.batch_parts`; empty unless
            the contender has a number of cores.
    """

    messages: int
    wall_s: float
    cpu_s: float
    batch_ms: list[int]
    peak_bytes: int
    checkpoint_bytes: int
    out: Path
    parts: tuple[BatchParts, ...] = ()


@dataclass(slots=True)
class WarmProcess:
    """Warm process of a contender.

    Attributes:
        name: name of the contender.
        work: folder for its files.
        limit_s: time limit of an answer, seconds.
    """

    name: str
    work: Path
    limit_s: float
    _process: subprocess.Popen[bytes] = field(init=False)
    _tree: psutil.Process = field(init=False)

    def __post_init__(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)  # a run must not resume from a checkpoint of an unfinished one
        self.work.mkdir(parents=True)
        command = [sys.executable, "-P", "-m", "bench.lifecycle.worker", self.name, str(self.work / "spark")]
        variables = {**os.environ, "PYTHONPATH": str(flink.ROOT)}
        if self.name == flink.NAME:
            command, variables = flink.command()
        with (self.work / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=variables, cwd=self.work
            )
        self._tree = psutil.Process(self._process.pid)

    def run(self, source: Input, label: str, limit_s: float | None = None) -> Run:
        """Run the contender over an input; return its cost.

        Args:
            source: input of the run.
            label: unique label of the run, part of its folder's name.
            limit_s: time limit of this run, seconds; None takes that of the process.

        Raises:
            DidNotFinish: the run exceeded its time limit; the process is ended.
            Crashed: the run failed.
        """
        place = self.work / f"run-{label}"
        limit_s = self.limit_s if limit_s is None else limit_s
        if self.name == flink.NAME:
            return self._on_flink(source, place, limit_s)
        fields = {"path": str(source.path), "counts": source.counts, "newest_ms": source.newest_ms}
        commits = place / "checkpoint" / "commits"
        watch = Watch.begin(self._tree, [commits / "0", commits / str(len(source.counts) - 1)])
        request = {"fleet": asdict(source.fleet), "place": str(place), **fields}
        answer, _ = self._ask(request, watch, time.monotonic() + limit_s)
        run = _run(source, watch.passed[0], watch.passed[1], watch.peak_bytes, answer["batch_ms"][1:], place)
        return replace(run, parts=tuple(BatchParts(**parts) for parts in answer.get("parts", ())[1:]))

    def _on_flink(self, source: Input, place: Path, limit_s: float) -> Run:
        requests = flink.request(source, place / "head", 1), flink.request(source, place, len(source.counts))
        until_s = time.monotonic() + limit_s
        head = Watch.begin(self._tree, [])
        _, head_end = self._ask(requests[0], head, until_s)
        whole = Watch.begin(self._tree, [])
        _, whole_end = self._ask(requests[1], whole, until_s)
        spent = Reading(
            whole_end.wall_s - whole.began.wall_s - (head_end.wall_s - head.began.wall_s),
            whole_end.cpu_s - whole.began.cpu_s - (head_end.cpu_s - head.began.cpu_s),
        )
        return _run(source, Reading(0, 0), spent, max(head.peak_bytes, whole.peak_bytes), [], place)

    def _ask(self, request: dict[str, Any], watch: Watch, until_s: float) -> tuple[dict[str, Any], Reading]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):  # the process has ended: detected below, by its missing answer
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        with selectors.DefaultSelector() as ready:
            ready.register(stdout, selectors.EVENT_READ)
            while not ready.select(_POLL_S):
                watch.look()
                if time.monotonic() > until_s:
                    self.end()
                    raise DidNotFinish
        answered = watch.now()
        line = stdout.readline()
        answer = json.loads(line) if line else {"fault": "its process ended"}
        if "fault" in answer:
            log = (self.work / "log").read_text(errors="replace").splitlines()[-5:]
            raise Crashed("\n".join([f"{self.name} failed: {answer['fault']}", *log]), code="contender-failed")
        return answer, answered

    def end(self) -> None:
        """End the process and its descendants."""
        try:
            tree = [*self._tree.children(recursive=True), self._tree]
        except psutil.Error:
            return
        for process in tree:
            try:
                process.kill()
            except psutil.Error:
                continue
        self._process.wait()


def _run(source: Input, start: Reading, end: Reading, peak_bytes: int, batch_ms: list[int], place: Path) -> Run:
    return Run(
        sum(source.counts[1:]),
        end.wall_s - start.wall_s,
        end.cpu_s - start.cpu_s,
        batch_ms,
        peak_bytes,
        size_bytes(place / "checkpoint"),
        place / "out",
    )
