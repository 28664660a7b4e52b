"""The runner of streams: starts, pauses after failures, and the place at which a stream begins."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import structlog

from fleetpulse.core.errors import FleetError
from fleetpulse.core.monitoring.health import problems_of
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.io.checkpoints.stream_rebuild import StreamBegin, write_begin
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance.readers import oldest_live_pin, reader_pins
from fleetpulse.io.streams import rebuilds, runner
from fleetpulse.io.streams.runner import StreamRunner, cause_of
from tests.support.homes.checkpoints import write_offsets
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


class FakeQuery:
    """Query whose end a test determines."""

    def __init__(self) -> None:
        self.isActive = True
        self.fault: str | None = None
        self.stopped = False
        self.status = {"isTriggerActive": False}

    def exception(self) -> str | None:
        return self.fault

    def fail(self, fault: str) -> None:
        self.isActive, self.fault = False, fault

    def stop(self) -> None:
        self.isActive, self.stopped = False, True


class FakeStream(ModuleType):
    """Module of a stream whose starts are recorded."""

    def __init__(self) -> None:
        super().__init__("fake_stream")
        self.queries: list[FakeQuery] = []
        self.begins: list[int] = []
        self.refusal: FleetError | None = None

    def start_query(self, _spark: Any, _home: Home, _options: StreamOptions, begin: int) -> FakeQuery:
        if self.refusal:
            raise self.refusal
        self.begins.append(begin)
        self.queries.append(FakeQuery())
        return self.queries[-1]


class Clock:
    """Monotonic clock of the runner."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=lambda _: None))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    module = FakeStream()
    monkeypatch.setitem(sys.modules, "fake_stream", module)
    monkeypatch.setattr(runner, "_MODULES", dict.fromkeys(StreamName, "fake_stream"))
    return module


def _spark() -> Any:
    return SimpleNamespace(conf=SimpleNamespace(get=lambda *_: None, set=lambda *_: None, unset=lambda *_: None))


def _runner(home: Home) -> StreamRunner:
    return StreamRunner(_spark(), home, StreamOptions((StreamName.SESSIONS,)))


def test_failed_stream_starts_again_after_a_growing_pause(
    home: Home, stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, running = Clock(monkeypatch), _runner(home)
    starts: list[int] = []
    running.check()
    for pause_s in (5, 10, 20):
        stream.queries[-1].fail("first line\nsecond line")
        running.check()
        assert problems_of({"streams": running.status()}) == [
            f"the stream sessions has failed {len(starts) + 1} times, and starts again: first line"
        ]
        clock.now_s += pause_s - 0.1
        running.check()
        assert not stream.queries[-1].isActive
        clock.now_s += 0.2
        running.check()
        assert stream.queries[-1].isActive
        starts.append(len(stream.queries))
        assert problems_of({"streams": running.status()}) == []
    assert starts == [2, 3, 4]


def test_pause_is_short_again_after_a_committed_batch(home: Home, stream: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, running = Clock(monkeypatch), _runner(home)
    running.check()
    for pause_s in (5, 10):
        stream.queries[-1].fail("it failed")
        running.check()
        clock.now_s += pause_s + 0.1
        running.check()
    commits = home.stream_checkpoint(StreamName.SESSIONS) / "commits"
    commits.mkdir(parents=True)
    (commits / "0").write_text("v1\n{}")
    stream.queries[-1].fail("it failed")
    running.check()
    clock.now_s += 5.1
    running.check()
    assert stream.queries[-1].isActive
    assert running.status()["sessions"] == {"state": "running", "batch": 0, "failures": 3, "error": None, "missed": 0}


def test_cause_of_a_failure_in_python_is_the_end_of_its_traceback() -> None:
    failure = """[FOREACH_BATCH_USER_FUNCTION_ERROR] An error occurred. Traceback (most recent call last):
  File "clientserver.py", line 644, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
pyspark.errors.exceptions.captured.AnalysisException: More than one event time columns are available.
 SQLSTATE: 39000
\tat org.apache.spark.Sink.addBatch(Sink.scala:49)
Caused by: py4j.Py4JException: An exception was raised"""
    assert cause_of(failure).startswith("pyspark.errors.exceptions.captured.AnalysisException: More than one")
    assert cause_of("[STATE] a file is missing\n\tat org.apache.spark.State") == "[STATE] a file is missing"


def test_stream_that_cannot_start_does_not_stop_the_others(
    home: Home, stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, running = Clock(monkeypatch), _runner(home)
    stream.refusal = FleetError("no checkpoint", code="offsets-damaged")
    running.check()
    failed = {"state": "failed", "batch": None, "failures": 1, "error": "no checkpoint", "missed": 0}
    assert running.status()["sessions"] == failed
    stream.refusal = None
    clock.now_s += 6
    running.check()
    assert running.status()["sessions"]["state"] == "running"


def test_streams_stop_with_the_job(home: Home, stream: FakeStream) -> None:
    running = _runner(home)
    running.check()
    running.stop()
    assert [query.stopped for query in stream.queries] == [True]


def test_stream_that_is_off_is_not_imported(home: Home) -> None:
    running = StreamRunner(_spark(), home, StreamOptions())
    running.check()
    assert running.status() == {}


def test_stream_that_is_switched_off_keeps_no_versions_and_begins_at_the_present_afterwards(
    home: Home, stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuilds, "DeltaLog", lambda _: SimpleNamespace(latest=lambda: 9))
    write_offsets(home.checkpoint, 0, {"version": 8})
    write_offsets(home.stream_checkpoint(StreamName.SESSIONS), 0, {"version": 3})
    _runner(home).check()
    assert stream.begins == [0], "it continues from its checkpoint"
    assert oldest_live_pin(reader_pins(home)).version == 3
    StreamRunner(_spark(), home, StreamOptions())
    assert oldest_live_pin(reader_pins(home)).version == 8
    _runner(home).check()
    assert stream.begins == [0, 8]


@pytest.mark.parametrize(("latest", "begin"), [(9, 7), (6, 6)])
def test_new_stream_begins_where_the_job_continues_and_there_again_until_its_first_batch_is_committed(
    home: Home, stream: FakeStream, monkeypatch: pytest.MonkeyPatch, latest: int, begin: int
) -> None:
    newest = [latest]
    monkeypatch.setattr(rebuilds, "DeltaLog", lambda _: SimpleNamespace(latest=lambda: newest[0]))
    write_offsets(home.checkpoint, 0, {"version": 7})
    checkpoint = home.stream_checkpoint(StreamName.SESSIONS)
    _runner(home).check()
    write_offsets(checkpoint, 0, {"version": 8}, committed=False)  # the job is killed in its first batch
    write_offsets(home.checkpoint, 1, {"version": 20})
    newest[0] = 25
    _runner(home).check()
    assert stream.begins == [begin, begin]
    assert oldest_live_pin(reader_pins(home)).version == begin
    write_offsets(checkpoint, 0, {"version": 8})
    assert oldest_live_pin(reader_pins(home)).version == begin, "no watermark has passed a row of its first batch"


def test_stream_of_a_new_home_begins_with_the_first_row_even_if_the_job_commits_before_the_stream_starts(
    home: Home, stream: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuilds, "DeltaLog", lambda _: SimpleNamespace(latest=lambda: 9))
    running = _runner(home)
    write_offsets(home.checkpoint, 0, {"version": 8})
    running.check()
    assert stream.begins == [0]


def test_missed_rows_of_a_stream_are_a_problem(home: Home, stream: FakeStream) -> None:
    checkpoint = home.stream_checkpoint(StreamName.SESSIONS)
    for missed, words in ((1_234, "1,234 rows"), (None, "an unknown number of rows")):
        write_begin(checkpoint, StreamBegin(3, 5, missed))
        running = _runner(home)
        running.check()
        [problem] = problems_of({"streams": running.status()})
        assert words in problem and "sessions" in problem


@pytest.mark.parametrize("error", [FleetError("gone", code="table-version-missing"), OSError(5, "Input/output error")])
def test_an_unreadable_log_at_the_end_of_a_rebuild_does_not_stop_the_job(
    home: Home, stream: FakeStream, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any) -> None:
        raise error

    running = _runner(home)
    running.check()
    with monkeypatch.context() as patched:
        patched.setattr(runner, "end_finished_rebuild", refuse)
        with structlog.testing.capture_logs() as logged:
            running.check()
            running.check()
    assert len(logged) == 1, "the same fault is logged once"
    assert stream.queries[-1].isActive
    status = running.status()["sessions"]
    assert (status["state"], status["error"]) == ("running", str(error))
    running.check()
    assert running.status()["sessions"]["error"] is None


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"begin": 1, "other": 2}'])
def test_a_damaged_record_of_a_stream_stops_neither_the_job_nor_other_streams(
    home: Home, stream: FakeStream, content: str
) -> None:
    checkpoint = home.stream_checkpoint(StreamName.SESSIONS)
    write_begin(checkpoint, StreamBegin(3))
    [record] = checkpoint.iterdir()
    record.write_text(content)
    running = StreamRunner(_spark(), home, StreamOptions((StreamName.SESSIONS, StreamName.COMMANDS)))
    running.check()
    status = running.status()
    assert (status["sessions"]["state"], status["commands"]["state"]) == ("failed", "running")
    assert str(record) in status["sessions"]["error"]
    with refused("checkpoint-damaged"):
        reader_pins(home)
