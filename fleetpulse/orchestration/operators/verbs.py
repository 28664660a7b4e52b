"""Airflow operators that run verbs of the command ``fleet``.

A task runs the command that you would type, and fails with the command's own error message.

Rule 1: a verb that refuses (exit 1 or 2 with an error message) is not retried: a retry would refuse
as well. A verb that a signal ended or that could not be started is retried. A verb that timed out
is not: the stream may be stopped meanwhile.
Rule 2: the first line of a failure is the error message of the verb.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException, AirflowTaskTimeout

from fleetpulse.core.errors import FleetError
from fleetpulse.core.operations.dropped_devices import arguments_as_planned
from fleetpulse.orchestration.approvals import RunApproval, forget_approvals, is_cleared
from fleetpulse.orchestration.assets import facts_of
from fleetpulse.orchestration.config import CONFIG, OrchestrationConfig
from fleetpulse.orchestration.pages.serving import DataDocsLink
from fleetpulse.orchestration.pools import STATE_POOL
from fleetpulse.orchestration.subprocess import ProcessResult, Verb

REFUSED: Final = "refused"  # XCom key of a task's failure reason, for other tasks of the run
ANSWERED: Final = "answered"  # XCom key of a person's answer: a task that skips others returns nothing
STOPPED_BY: Final = "airflow {{ dag.dag_id }} {{ run_id }}"  # identifies the run that stopped the stream, in desired.json
GENERATION: Final = "<generation>"  # word of a verb that stands for the generation that the run made
_NO: Final = "Reject"  # Airflow's name of this answer
_MOST_RETURNED: Final = 64 * 1024 * 1024  # bytes of a result, which Airflow stores in its database
_PATIENCE_S: Final = 120.0
_MAX_PLAN_CHARS: Final = 20_000  # characters of a plan, which a person reads


class FleetOperator(BaseOperator):
    """Run one verb of the command.

    Args:
        words: verb and arguments, each a template. An empty word, or an option with an empty value
            (``--version=``), is left out. So an empty form field omits its option. The word
            `GENERATION` stands for the generation that `MakeGeneration` made in the run.
        gives: kind of the result. ``json``: the object on standard output, or the list of objects
            unless there is exactly one; ``rows``: the list of objects, however many; ``stderr``: the
            text for people on standard error; None: no result, only the log.
        approved: whether the verb runs only if the plan of the run is approved.
        step: step of the run to which the plan and its approval belong; empty if the run has one approval.
        place: configuration of the installation.
    """

    template_fields: ClassVar[Sequence[str]] = ("words",)
    ui_color = "#e8f0fe"

    def __init__(
        self,
        *,
        words: Sequence[str],
        gives: Literal["json", "rows", "stderr"] | None = None,
        approved: bool = False,
        step: str = "",
        place: OrchestrationConfig = CONFIG,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.words = list(words)
        self.gives = gives
        self.approved = approved
        self.step = step
        self.place = place
        self._verb: Verb | None = None

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Run the verb; return the result that ``gives`` selects.

        Raises:
            AirflowFailException: the result is larger than a task may return. Exceptions of
                `run_verb` are raised, too.
        """
        ended = self.run_verb(self.words, context)
        self._emit(context)
        if ended.too_long:
            most = f"{_MOST_RETURNED:,} bytes, the limit of a task's result"
            reason = f"{' '.join(self.words[:2])} succeeded, but wrote more than {most}; request less at a time"
            publish_reason(context, reason)
            raise AirflowFailException(reason)
        if self.gives == "stderr":
            return "\n".join(ended.stderr or ended.out)[-_MAX_PLAN_CHARS:]
        if self.gives is None:
            return None
        found = _objects(ended.out)
        return found[0] if self.gives == "json" and len(found) == 1 else found

    def run_verb(self, arguments: Sequence[str], context: Mapping[str, Any]) -> ProcessResult:
        """Run a verb until it ends.

        Raises:
            AirflowFailException: the verb refused or timed out, the plan is not approved, or the run
                made no generation; Airflow does not retry the task.
            AirflowException: the verb was killed or could not be started; Airflow may retry the
                task.
        """
        if self.approved:
            with failing(context):
                RunApproval(self.place, context, self.step).require()
        if GENERATION in arguments:
            with failing(context):
                made = str(RunApproval(self.place, context).generation())
            arguments = [made if word == GENERATION else word for word in arguments]
        keeps = _MOST_RETURNED if self.gives in ("json", "rows") else None
        line = self.line_of(drop_empty_arguments(arguments))
        self.log.info("%s", " ".join(line))
        self._verb = Verb(line, self._log_line, keep_bytes=keeps, environment=self.environment(), asked_by=_asked_by(context))
        try:
            ended = self._verb.wait()
        except AirflowTaskTimeout:
            reason = f"{' '.join(arguments[:2])} was stopped: it exceeded its timeout of {self.execution_timeout}"
            publish_reason(context, reason)
            raise AirflowFailException(reason) from None
        if ended.code == 0:
            return ended
        publish_reason(context, ended.reason())
        raise (AirflowFailException if ended.refused else AirflowException)(ended.reason())

    def line_of(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line, as you would type it."""
        return self.place.command_line(list(arguments))

    def environment(self) -> dict[str, str] | None:
        """Return the command's environment; None for the present one without Airflow's variables."""
        return None

    def on_kill(self) -> None:
        """Stop the verb and the processes of its group."""
        if self._verb is not None:
            self._verb.stop()

    def _log_line(self, line: str) -> None:
        self.log.info("%s", line)

    def _emit(self, context: Mapping[str, Any]) -> None:
        """Add metadata to the event of each table that this task writes, see `facts_of`."""
        for outlet in self.outlets:
            if name := getattr(outlet, "name", ""):
                context["outlet_events"][outlet].extra.update(facts_of(self.place.home, name))


class PlanOperator(FleetOperator):
    """Print the plan of a change, and save it for the approval of the run.

    Its verb is a dry run.
    """

    def __init__(self, *, pool: str = STATE_POOL, **kwargs: Any) -> None:
        super().__init__(gives="stderr", pool=pool, **kwargs)

    def execute(self, context: Mapping[str, Any]) -> str:
        """Run the verb; return the plan."""
        plan: str = super().execute(context)
        RunApproval(self.place, context, self.step).save_plan(plan)
        return plan


class MakeGeneration(FleetOperator):
    """Run the verb that makes the new generation, and record its number for the later tasks of the run.

    Args:
        bootstraps: whether the verb is a bootstrap. It then uses the snapshot of the plan, and refuses to
            drop more devices than the plan: the task may run hours later.
    """

    def __init__(self, *, bootstraps: bool = False, **kwargs: Any) -> None:
        super().__init__(gives="json", approved=True, pool=STATE_POOL, **kwargs)
        self.bootstraps = bootstraps

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Run the verb; return its result, with the number of the generation."""
        with failing(context):
            approval = RunApproval(self.place, context)
            approval.begin()
            if self.bootstraps:
                others = [word for word in self.words if not word.startswith(("--version=", "--at="))]
                self.words = [*others, *arguments_as_planned(approval.plan())]
        found = super().execute(context)
        with failing(context):
            RunApproval(self.place, context).made(int(found["generation"]))
        return found


class Recurring(FleetOperator):
    """Run a scheduled verb; skip scheduled runs while another run changes the state.

    The pool alone does not prevent an overlap. It is free between the tasks of such a run, and
    while one of them waits for a retry, although the stream is stopped.
    """

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Run the verb, or skip it.

        Raises:
            AirflowSkipException: a run has stopped the stream for a change. Exceptions of
                `FleetOperator.execute` are raised, too.
        """
        from fleetpulse.core.monitoring.supervision import AIRFLOWS
        from fleetpulse.io.home.desired_state import STOPPED, get_desired
        from fleetpulse.io.home.home import Home

        desired = get_desired(Home(self.place.home))
        by_a_run = desired.state == STOPPED and desired.by.startswith(AIRFLOWS)
        if by_a_run and context["dag_run"].run_type == "scheduled":
            raise AirflowSkipException(f"{desired.by} has stopped the stream for a change; skipped until the next scheduled run")
        return super().execute(context)


class QualityOperator(FleetOperator):
    """Run a verb that checks data quality; the task links to the Data Docs."""

    operator_extra_links = (DataDocsLink(),)


class TakeSnapshot(QualityOperator, Recurring):
    """Publish a snapshot if its rows pass the quality gate."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(words=["state", "snapshot", "--gate", "--json"], gives="json", pool=STATE_POOL, **kwargs)


class BuildDocs(QualityOperator):
    """Build the Data Docs from the results of quality checks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(words=["quality", "docs"], **kwargs)


class StopStream(FleetOperator):
    """Stop the stream for a run; refused if another run or a person has stopped it.

    A pool protects only a single task, but a change of the state is a sequence of tasks. The record
    that this run stopped the stream protects the sequence until the run starts the stream again.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(words=["stream", "stop", "--by", STOPPED_BY, "--own"], pool=STATE_POOL, **kwargs)

    def execute(self, context: Mapping[str, Any]) -> None:
        """Stop the stream; after a failure, reset the desired state to running.

        Airflow runs no teardown after a failed setup, so this operator resets the state itself.
        """
        try:
            self.run_verb(self.words, context)
        except BaseException:
            self._restore_running(self.words[3])
            raise

    def _restore_running(self, by: str) -> None:
        """Set the desired state to running if this run has set it to stopped, and record the start.

        The state is written directly: a killed task has only seconds, too few to run a verb.
        """
        from fleetpulse.core.operations.audit import Phase, recorded_arguments
        from fleetpulse.io.home.desired_state import RUNNING, STOPPED, get_desired, set_desired
        from fleetpulse.io.home.home import Home
        from fleetpulse.io.tables.audit import AuditedAction, AuditTable

        home = Home(self.place.home)
        found = get_desired(home)
        if found.state != STOPPED or found.by != by:
            return
        set_desired(home, RUNNING, by, only_if=found)
        done, records = AuditedAction.of_this_process("stream start", recorded_arguments({"by": by}), by), AuditTable(home)
        try:
            records.write(done, Phase.STARTED)
            records.write(done, Phase.FINISHED, "ok", 0)
        except Exception:  # the failure of the run itself must stay visible
            self.log.exception("no audit record of this start of the stream can be written")


class StartStream(FleetOperator):
    """Start the stream again; refused if another run or a person has stopped it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(words=["stream", "start", "--by", STOPPED_BY, "--own"], pool=STATE_POOL, **kwargs)


class RollbackOperator(FleetOperator):
    """Undo a failed change of the state: remove its generation, restart the stream.

    The generation is rolled back or discarded. This operator is the teardown of the task that
    stopped the stream. It runs if that task succeeded, whatever happened later, even in a run that
    a person marked as failed. Without a failure it does nothing. It undoes only the generation that
    the file of the approval records.

    Args:
        last: id of the task whose success means that there is nothing to undo.
    """

    template_fields: ClassVar[Sequence[str]] = ("words", "by")

    def __init__(self, *, last: str, **kwargs: Any) -> None:
        super().__init__(words=[], pool=STATE_POOL, **kwargs)
        self.last = last
        self.by = STOPPED_BY

    def execute(self, context: Mapping[str, Any]) -> str:
        """Undo the change; return a summary of the steps as text.

        Raises:
            AirflowFailException: a step was refused; the other steps were attempted nevertheless.
        """
        ti = context["ti"]
        if ti.get_task_states(ti.dag_id, run_ids=[ti.run_id], task_ids=[self.last])[ti.run_id].get(self.last) == "success":
            return "nothing to undo: no task failed"
        done: list[str] = []
        refused: list[str] = []
        try:
            begun, number = RunApproval(self.place, context).progress()
        except FleetError as error:
            begun, number = False, None
            done.append(f"no generation is undone: {error}")
        for arguments, done_text in self._steps(number, begun=begun):
            try:
                if arguments:
                    self.run_verb(arguments, context)
                done.append(done_text)
            except AirflowException as error:
                refused.append(f"{' '.join(arguments[:2])}: {error}")
        summary = "; ".join([*done, *refused]) or "nothing had been changed yet"
        if refused:
            raise AirflowFailException(f"cannot undo the change: {summary}")
        return summary

    def _steps(self, number: int | None, *, begun: bool) -> Iterator[tuple[list[str], str]]:
        """Yield the steps to undo the change, each as the arguments of a verb and a summary.

        The desired state is read before each step, since a step may take minutes. A step without
        arguments is already done: this may be a retry after the first attempt died.

        Args:
            number: generation that the run made; None if it has recorded none.
            begun: whether the run has begun to make one.
        """
        from fleetpulse.io.checkpoints.generations import HELD, load_generations
        from fleetpulse.io.home.desired_state import get_desired
        from fleetpulse.io.home.home import Home

        home = Home(self.place.home)
        _await_maker(home.path)
        record, desired = load_generations(home.lifecycle), get_desired(home)
        held = record.held() if begun and number is None else None
        if held is not None and held.made_at_ms >= desired.at_ms and desired.by == self.by:
            number = held.number  # created since this run stopped the stream, by a task that died before it recorded it
        if number is not None and record.current == number:
            if not _stopped_by_another(home.path, self.by):
                yield ["stream", "stop", "--by", self.by, "--own"], "stopped the stream"
            yield ["state", "rollback"], f"rolled back from generation {number}"
        elif number is not None and (known := record.of(number)) is not None and known.status == HELD:
            yield ["state", "discard", str(number)], f"discarded generation {number}"
        elif number is not None:
            yield [], f"generation {number} is no longer held; nothing is left to undo"
        if not _stopped_by_another(home.path, self.by):
            yield ["stream", "start", "--by", self.by, "--own"], "started the stream again"


class RunResultOperator(BaseOperator):
    """Leaf of a run that fails if any task before it failed.

    The first line of its failure is the reason of that task. Airflow derives the state of a run
    from its leaves. A leaf that undoes a change or builds the report of a failed check would make the
    run successful. If a person marks a run as failed, Airflow skips all tasks that have not started,
    except teardowns. So this operator is a teardown without a setup that counts for the state of
    the run. It runs once the task before it has ended, in any state.

    Args:
        of: ids of the tasks before it, in their order.
        undone_by: id of the task whose result lists the steps undone; None if the run has none.
        asked_by: ids of the approval tasks, whose *Reject* skips the later tasks. The approvals end with
            the run.
        steps: their steps, see `RunApproval`.
        place: configuration of the installation.
    """

    def __init__(
        self,
        *,
        of: Sequence[str],
        undone_by: str | None = None,
        asked_by: Sequence[str] = (),
        steps: Sequence[str] = ("",),
        place: OrchestrationConfig = CONFIG,
        **kwargs: Any,
    ) -> None:
        super().__init__(on_failure_callback=None, **kwargs)
        self.as_teardown(on_failure_fail_dagrun=True)
        self.of = list(of)
        self.undone_by = undone_by
        self.asked_by, self.steps = list(asked_by), list(steps)
        self.place = place

    def execute(self, context: Mapping[str, Any]) -> str:
        """Check the states of the tasks.

        Raises:
            AirflowFailException: a task failed, or a person ended the run.
        """
        ti = context["ti"]
        if self.asked_by:
            forget_approvals(self.place, ti, self.steps)
        states = ti.get_task_states(ti.dag_id, run_ids=[ti.run_id])[ti.run_id]
        failed = [name for name in self.of if states.get(name) == "failed"]
        skipped = [name for name in self.of if states.get(name) == "skipped"]
        if not failed and not skipped:
            return "done"
        undone = ti.xcom_pull(task_ids=self.undone_by) if self.undone_by else None
        if not failed and (rejected := self._rejected(ti)) is not None:
            return "nothing was changed" if rejected == self.asked_by[0] else f"{rejected} was rejected; then: {undone}"
        lines = [f"{name}: {ti.xcom_pull(task_ids=name, key=REFUSED) or 'it gave no reason; see its log'}" for name in failed]
        ended = [] if failed else [f"the run was ended before {skipped[0]}"]
        raise AirflowFailException("\n".join([*lines, *ended, *([f"then: {undone}"] if undone else [])]))

    def _rejected(self, ti: Any) -> str | None:
        """Return the approval task whose request the person rejected; None if there is none."""
        return next((name for name in self.asked_by if _NO in (ti.xcom_pull(task_ids=name, key=ANSWERED) or ())), None)


@contextmanager
def failing(context: Mapping[str, Any]) -> Iterator[None]:
    """Turn a FleetError into a failure of the task without a retry, and publish its text."""
    try:
        yield
    except FleetError as error:
        publish_reason(context, str(error))
        raise AirflowFailException(str(error)) from None


def publish_reason(context: Mapping[str, Any], reason: str) -> None:
    """Publish the reason of a failure to the other tasks of the run."""
    context["ti"].xcom_push(key=REFUSED, value=reason)


def drop_empty_arguments(arguments: Sequence[str]) -> list[str]:
    """Drop empty words and options without a value (``--version=``)."""
    return [
        argument
        for argument in arguments
        if argument and not (argument.startswith("--") and "=" in argument and not argument.partition("=")[2])
    ]


def _objects(lines: Sequence[str]) -> list[Any]:
    """Return the JSON values of the lines; skip lines that are not JSON."""
    found: list[Any] = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _stopped_by_another(home: Path, by: str) -> bool:
    """Whether another run or a person stopped the stream; it must then stay stopped."""
    from fleetpulse.io.home.desired_state import STOPPED, get_desired
    from fleetpulse.io.home.home import Home

    found = get_desired(Home(home))
    return found.state == STOPPED and found.by != by


def _await_maker(home: Path) -> None:
    """Wait at most `_PATIENCE_S` until an interrupted verb releases its generation."""
    from fleetpulse.io.home.exclusive import is_making
    from fleetpulse.io.home.home import Home

    limit = time.monotonic() + _PATIENCE_S
    while is_making(Home(home)) and time.monotonic() < limit:
        time.sleep(0.5)


def _asked_by(context: Mapping[str, Any]) -> str:
    """Return the name of the task's run, after the user who triggered it, if known.

    A run that was cleared has no user: Airflow does not record who cleared it.
    """
    run = context.get("dag_run")
    if run is None:
        return ""
    name = f"{run.dag_id} {run.run_id}"
    if is_cleared(context):
        return f"{name} (cleared)"
    return f"{run.triggering_user_name}, {name}" if run.triggering_user_name else name
