"""The operators: a task runs the command that a person would type, and fails with the command's own sentence.

Rule 1: a verb that refuses (exit 1 or 2, with its sentence) is not tried again: it would say the same. One that a signal ended,
or that the system could not start, is. One that took too long is not: the stream may stand still for it.
Rule 2: the first line of a failure is the verb's sentence.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException, AirflowTaskTimeout

from fleetpulse.orchestration.assets import facts_of
from fleetpulse.orchestration.config import PLACE, OrchestrationConfig
from fleetpulse.orchestration.pages import DataDocsLink
from fleetpulse.orchestration.pools import STATE_POOL
from fleetpulse.orchestration.subprocess import ProcessResult, Verb

REFUSED: Final = "refused"  # under this key a task leaves its reason to others of its run
ANSWERED: Final = "answered"  # and a person's answer: a task that skips what follows returns nothing
BY: Final = "airflow {{ dag.dag_id }} {{ run_id }}"  # who stopped the stream, as desired.json names it
_NO: Final = "Reject"  # what Airflow calls this answer
_MOST_RETURNED: Final = 64 * 1024 * 1024  # bytes of a result: it goes into Airflow's database
_PATIENCE_S: Final = 120.0
_MOST_TOLD: Final = 20_000  # characters of a plan: it is read by a person


class FleetOperator(BaseOperator):
    """Run one verb.

    Args:
        words: the verb and its arguments, each a template. One that comes to nothing, or to an option without its value
            (``--version=``), is left out: so a field of a form that is empty is an option that is not given.
        gives: what becomes of what it wrote: ``json``: the object on standard output is returned (a list where there is not
            one); ``rows``: the list of objects there, however many; ``told``: what it said to people, as text; None: the log
            alone has it.
        place: the installation.
    """

    template_fields: ClassVar[Sequence[str]] = ("words",)
    ui_color = "#e8f0fe"

    def __init__(
        self,
        *,
        words: Sequence[str],
        gives: Literal["json", "rows", "told"] | None = None,
        place: OrchestrationConfig = PLACE,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.words = list(words)
        self.gives = gives
        self.place = place
        self._verb: Verb | None = None

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Run it; return what ``gives`` names.

        Raises:
            AirflowFailException: that is more than a task may return; beside what `run_verb` raises.
        """
        ended = self.run_verb(self.words, context)
        self._emit(context)
        if ended.too_long:
            most = f"{_MOST_RETURNED:,} bytes, the most that a task returns"
            reason = f"{' '.join(self.words[:2])} has done its work, and wrote more than {most}: ask for less at a time"
            leave(context, reason)
            raise AirflowFailException(reason)
        if self.gives == "told":
            return "\n".join(ended.told or ended.out)[-_MOST_TOLD:]
        if self.gives is None:
            return None
        found = _objects(ended.out)
        return found[0] if self.gives == "json" and len(found) == 1 else found

    def run_verb(self, words: Sequence[str], context: Mapping[str, Any]) -> ProcessResult:
        """Run a verb to its end.

        Raises:
            AirflowFailException: it refused, or took too long: given again, it would again.
            AirflowException: it was ended, or could not be started: it may be tried again.
        """
        keeps = _MOST_RETURNED if self.gives in ("json", "rows") else None
        line = self.line_of(given(words))
        self.log.info("%s", " ".join(line))
        self._verb = Verb(line, self._say, keep_bytes=keeps, environment=self.environment(), asked_by=_asked_by(context))
        try:
            ended = self._verb.wait()
        except AirflowTaskTimeout:
            reason = f"{' '.join(words[:2])} was broken off: it took longer than {self.execution_timeout}"
            leave(context, reason)
            raise AirflowFailException(reason) from None
        if ended.code == 0:
            return ended
        leave(context, ended.reason())
        raise (AirflowFailException if ended.refused else AirflowException)(ended.reason())

    def line_of(self, words: Sequence[str]) -> list[str]:
        """Return the command line, as a person types it."""
        return self.place.line(list(words))

    def environment(self) -> dict[str, str] | None:
        """Return what the command finds in its environment; None: ours, without what is Airflow's."""
        return None

    def on_kill(self) -> None:
        """Stop the verb, and all that it started in its group."""
        if self._verb is not None:
            self._verb.stop()

    def _say(self, line: str) -> None:
        self.log.info("%s", line)

    def _emit(self, context: Mapping[str, Any]) -> None:
        """Say of each table that this task writes what it is now: version, rows, how far it is judged."""
        for outlet in self.outlets:
            if name := getattr(outlet, "name", ""):
                context["outlet_events"][outlet].extra.update(facts_of(self.place.home, name))


class Recurring(FleetOperator):
    """Run a verb that comes again by itself: on schedule it is left out while a run changes the state.

    Between the tasks of such a run, and while one waits to be tried again, the pool has room, and the stream stands still.
    """

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Run it, unless it is left out.

        Raises:
            AirflowSkipException: a run has stopped the stream for a change; beside what `FleetOperator.execute` raises.
        """
        from fleetpulse.core.monitoring.supervision import AIRFLOWS
        from fleetpulse.io.home.desired_state import STOPPED, get_desired
        from fleetpulse.io.home.home import Home

        wanted = get_desired(Home(self.place.home))
        by_a_run = wanted.what == STOPPED and wanted.by.startswith(AIRFLOWS)
        if by_a_run and context["dag_run"].run_type == "scheduled":
            raise AirflowSkipException(f"{wanted.by} has stopped the stream for a change: this comes again by itself")
        return super().execute(context)


class QualityOperator(FleetOperator):
    """Run a verb that looks at the data; the task is linked with the pages of the looks, above all where it refuses."""

    operator_extra_links = (DataDocsLink(),)


class TakeSnapshot(QualityOperator, Recurring):
    """Publish a snapshot, where a look at its rows finds nothing."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(words=["state", "snapshot", "--gate", "--json"], gives="json", pool=STATE_POOL, **kwargs)


class BuildDocs(QualityOperator):
    """Build the pages of the looks at the data."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(words=["quality", "docs"], **kwargs)


class StopStream(FleetOperator):
    """Stop the stream for a run: refused where another run, or a person, has stopped it already.

    A pool guards a task, and this begins a sequence of them: that the stream is stopped by this run is what guards it, until
    the run starts it again.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(words=["stream", "stop", "--by", BY, "--own"], pool=STATE_POOL, **kwargs)

    def execute(self, context: Mapping[str, Any]) -> None:
        """Stop it; where that fails the stream is not left as one that is to be stopped, since nothing undoes a failed setup."""
        try:
            self.run_verb(self.words, context)
        except BaseException:
            self._take_back(self.words[3])
            raise

    def _take_back(self, by: str) -> None:
        """Let the stream run where this run has stopped it: here, since a killed task has seconds, and no time for a verb."""
        from fleetpulse.io.home.desired_state import RUNNING, STOPPED, get_desired, set_desired
        from fleetpulse.io.home.home import Home

        home = Home(self.place.home)
        found = get_desired(home)
        if found.what == STOPPED and found.by == by:
            set_desired(home, RUNNING, by, only_if=found)


class StartStream(FleetOperator):
    """Start the stream again that this run stopped: refused where somebody else stopped it meanwhile."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(words=["stream", "start", "--by", BY, "--own"], pool=STATE_POOL, **kwargs)


class RollbackOperator(FleetOperator):
    """Undo a change of the state that failed: roll back or discard the generation made, and start the stream again.

    It is the teardown of the task that stopped the stream: it runs where that one succeeded, whatever came after, even in a
    run that a person marked as failed. Where nothing failed there is nothing to do.

    Args:
        made_by: the task that made the generation.
        last: the task whose success means that nothing has to be undone.
    """

    template_fields: ClassVar[Sequence[str]] = ("words", "by")

    def __init__(self, *, made_by: str, last: str, **kwargs: Any) -> None:
        super().__init__(words=[], pool=STATE_POOL, **kwargs)
        self.made_by = made_by
        self.last = last
        self.by = BY

    def execute(self, context: Mapping[str, Any]) -> str:
        """Undo, and return in words what was done.

        Raises:
            AirflowFailException: a step was refused; the others were tried all the same.
        """
        ti = context["ti"]
        if ti.get_task_states(ti.dag_id, run_ids=[ti.run_id], task_ids=[self.last])[ti.run_id].get(self.last) == "success":
            return "nothing failed: nothing to undo"
        done: list[str] = []
        refused: list[str] = []
        for words, told in self._steps(ti.xcom_pull(task_ids=self.made_by)):
            try:
                if words:
                    self.run_verb(words, context)
                done.append(told)
            except AirflowException as error:
                refused.append(f"{' '.join(words[:2])}: {error}")
        summary = "; ".join([*done, *refused]) or "nothing had been changed"
        if refused:
            raise AirflowFailException(f"going back failed: {summary}")
        return summary

    def _steps(self, made: Mapping[str, Any] | None) -> Iterator[tuple[list[str], str]]:
        """Give one step after the other; what another wants is asked before each, since one may take minutes.

        A step without words says what was found done: this may be a second try, whose first one died on its way.
        """
        from fleetpulse.io.checkpoints.generations import HELD, load_generations
        from fleetpulse.io.home.desired_state import get_desired
        from fleetpulse.io.home.home import Home

        home = Home(self.place.home)
        _await_maker(home.path)
        record, wanted = load_generations(home.lifecycle), get_desired(home)
        number = int(made["generation"]) if made else None
        if number is None and (held := record.held()) is not None and held.made_at_ms >= wanted.at_ms and wanted.by == self.by:
            number = held.number  # made since we stopped the stream, by a task that died before it could say so
        if number is not None and record.current == number:
            if not _stopped_by_another(home.path, self.by):
                yield ["stream", "stop", "--by", self.by, "--own"], "stopped the stream"
            yield ["state", "rollback"], f"rolled back from generation {number}"
        elif number is not None and (known := record.of(number)) is not None and known.status == HELD:
            yield ["state", "discard", str(number)], f"discarded generation {number}"
        elif number is not None:
            yield [], f"generation {number} is not held any more, and there is nothing left to go back from"
        if not _stopped_by_another(home.path, self.by):
            yield ["stream", "start", "--by", self.by, "--own"], "started the stream again"


class RunResultOperator(BaseOperator):
    """The leaf of a run: red where any task before it failed, with the reason in its first line.

    Airflow colours a run by its leaves: one that builds the report of a failed check, or that undoes, would turn it green.
    Where a person marks a run as failed, it skips all that has not begun, but for teardowns: so this is one, without a setup,
    that counts. It runs once the task before it has ended, whichever way.

    Args:
        of: the tasks before it, in their order.
        undone_by: the task whose result says what was undone; None where nothing is.
        asked_by: the task that asks a person, whose *Reject* skips what follows; None where nobody is asked.
    """

    def __init__(self, *, of: Sequence[str], undone_by: str | None = None, asked_by: str | None = None, **kwargs: Any) -> None:
        super().__init__(on_failure_callback=None, **kwargs)
        self.as_teardown(on_failure_fail_dagrun=True)
        self.of = list(of)
        self.undone_by = undone_by
        self.asked_by = asked_by

    def execute(self, context: Mapping[str, Any]) -> str:
        """Look at how the tasks ended.

        Raises:
            AirflowFailException: one failed, or somebody ended the run.
        """
        ti = context["ti"]
        states = ti.get_task_states(ti.dag_id, run_ids=[ti.run_id])[ti.run_id]
        failed = [name for name in self.of if states.get(name) == "failed"]
        skipped = [name for name in self.of if states.get(name) == "skipped"]
        if not failed and not skipped:
            return "done"
        if not failed and self._rejected(ti):
            return "nothing was changed"
        lines = [f"{name}: {ti.xcom_pull(task_ids=name, key=REFUSED) or 'it gave no reason; see its log'}" for name in failed]
        undone = ti.xcom_pull(task_ids=self.undone_by) if self.undone_by else None
        ended = [] if failed else [f"somebody ended the run before {skipped[0]}"]
        raise AirflowFailException("\n".join([*lines, *ended, *([f"then: {undone}"] if undone else [])]))

    def _rejected(self, ti: Any) -> bool:
        """Whether the person who was asked said no."""
        return self.asked_by is not None and _NO in (ti.xcom_pull(task_ids=self.asked_by, key=ANSWERED) or ())


def leave(context: Mapping[str, Any], reason: str) -> None:
    """Leave the reason of a failure to the other tasks of the run."""
    context["ti"].xcom_push(key=REFUSED, value=reason)


def given(words: Sequence[str]) -> list[str]:
    """Return the words that say something: neither empty, nor an option without its value."""
    return [word for word in words if word and not (word.startswith("--") and "=" in word and not word.partition("=")[2])]


def _objects(lines: Sequence[str]) -> list[Any]:
    """Return the objects that were printed; lines that are none are left out."""
    found: list[Any] = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _stopped_by_another(home: Path, by: str) -> bool:
    """Whether somebody else stopped the stream: then it stays as that one wants it."""
    from fleetpulse.io.home.desired_state import STOPPED, get_desired
    from fleetpulse.io.home.home import Home

    found = get_desired(Home(home))
    return found.what == STOPPED and found.by != by


def _await_maker(home: Path) -> None:
    """Wait until a verb that was broken off has let go of what it made, though no longer than `_PATIENCE_S`."""
    from fleetpulse.io.home.exclusive import is_making
    from fleetpulse.io.home.home import Home

    limit = time.monotonic() + _PATIENCE_S
    while is_making(Home(home)) and time.monotonic() < limit:
        time.sleep(0.5)


def _asked_by(context: Mapping[str, Any]) -> str:
    """Name the run that a task belongs to, and who triggered it where that is known."""
    run = context.get("dag_run")
    if run is None:
        return ""
    name = f"{run.dag_id} {run.run_id}"
    return f"{run.triggering_user_name}, {name}" if run.triggering_user_name else name
