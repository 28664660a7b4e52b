"""Approvals of changes of the state: the permitted users, and the proof of an approval.

This module does not depend on Airflow.

Rule 1: the proof is a file of the home. In Airflow, a user who may trigger a run may also mark
the approval as successful, write XComs, and delete a run and trigger another with the same id. None of
these writes the file.
Rule 2: the file belongs to the plan, the parameters and one execution of its run. A new plan removes
the approval. The approval is not valid for other parameters, after a clear or another start of the run,
after a day, and for a second generation.
Rule 3: the plan shown to the approver is read from the same file.
Rule 4: the generation that the run made is recorded in the file as well, and read only from there: an
XCom could name another one.
Rule 5: a run with several approvals has a file for each. None of them approves another step.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from unicodedata import normalize

from fleetpulse.core.errors import FleetError
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.orchestration.config import OrchestrationConfig

_VALID_MS: Final = 24 * 3_600_000  # of an approval
_SCHEDULED: Final = "scheduled"  # Airflow's type of a run that the schedule triggered


class RunApproval:
    """File with the plan of a run, and its approval.

    Args:
        place: configuration of the installation.
        context: context of a task, with ``dag_run`` (which has ``start_date`` and ``clear_number``), ``ti`` and ``params``.
        step: step of the run that is approved; empty if the run has one approval.
    """

    def __init__(self, place: OrchestrationConfig, context: Mapping[str, Any], step: str = "") -> None:
        run = context["dag_run"]
        self._name = f"{run.dag_id} {run.run_id}"
        self._path = _path(place, run, step)
        self._cleared = is_cleared(context)
        self._started_s = None if run.start_date is None else run.start_date.timestamp()
        self._clear_number = run.clear_number
        self._parameters = json.dumps(dict(context.get("params") or {}), sort_keys=True, default=str)

    @property
    def parameters(self) -> str:
        """Parameters of the run as JSON, without backticks and line breaks."""
        return self._parameters.replace("`", "\\u0060")

    def save_plan(self, plan: str) -> None:
        """Write the plan; an earlier approval of this run is void."""
        of_run = {"started_s": self._started_s, "clear_number": self._clear_number, "parameters": self._parameters}
        self._write({**of_run, "plan": plan, "cleared": self._cleared})

    @property
    def cleared(self) -> bool:
        """Whether the run or one of its tasks "plan" and "approve" was cleared.

        Raises:
            FleetError: see `plan`.
        """
        return self._cleared or bool(self._read()["cleared"])

    def plan(self) -> str:
        """Return the plan.

        Raises:
            FleetError: the run has no plan, or was cleared or started again since its plan, or has
                other parameters than its plan.
        """
        return str(self._read()["plan"])

    def approve(self, by: str) -> None:
        """Record that the plan is approved.

        Args:
            by: name of the person, or the reason why nobody was asked.

        Raises:
            FleetError: see `plan`.
        """
        self._write({**self._read(), "approved_by": by, "approved_at_ms": wall_clock_ms()})

    def require(self) -> None:
        """Check that the plan is approved, at most a day ago.

        Raises:
            FleetError: it is not; see also `plan`.
        """
        found = self._read()
        if not found.get("approved_by"):
            raise FleetError(
                f'the run "{self._name}" has no approval: nobody answered "Approve" to its plan. A task "approve" that is marked '
                f"as successful is no approval; trigger a new run",
                code="approval-missing",
            )
        if wall_clock_ms() - found["approved_at_ms"] > _VALID_MS:
            raise FleetError(
                f'the approval of the run "{self._name}" has expired: it is older than 24 hours; trigger a new run',
                code="approval-expired",
            )

    def begin(self) -> None:
        """Record that the verb starts that makes the generation; a retry of its task may begin again.

        Raises:
            FleetError: the plan is not approved, see `require`; or the run has made a generation.
        """
        self.require()
        found = self._read()
        if found.get("generation") is not None:
            raise FleetError(
                f'the approval of the run "{self._name}" is used: the run has made generation {found["generation"]}; expected no '
                f"generation; trigger a new run",
                code="approval-used",
            )
        self._write({**found, "begun": True})

    def made(self, generation: int) -> None:
        """Record the number of the generation that the run made.

        Raises:
            FleetError: see `plan`.
        """
        self._write({**self._read(), "generation": generation})

    def generation(self) -> int:
        """Return the number of the generation that the run made.

        Raises:
            FleetError: it made none; see also `plan`.
        """
        number = self.progress()[1]
        if number is None:
            raise FleetError(
                f'the run "{self._name}" has made no generation: its task "act" recorded none. A task "act" that is marked as '
                f"successful makes none; trigger a new run",
                code="approval-generation-missing",
            )
        return number

    def progress(self) -> tuple[bool, int | None]:
        """Return whether the run has begun to make a generation, and the number of the one that it made.

        A change can be undone in a run that was cleared since its plan, unless the run was started
        again.

        Raises:
            FleetError: see `plan`.
        """
        found = self._read(permit_clear=True)
        return bool(found.get("begun")), found.get("generation")

    def _read(self, *, permit_clear: bool = False) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError) as error:
            raise FleetError(
                f'the run "{self._name}" has no plan ({error}); trigger a new run', code="approval-plan-missing"
            ) from None
        if found["started_s"] != self._started_s or (found["clear_number"] != self._clear_number and not permit_clear):
            raise FleetError(
                f'the run "{self._name}" was cleared or started again since its plan, which is not valid any more; trigger a new '
                f"run",
                code="approval-run-repeated",
            )
        if found["parameters"] != self._parameters:
            raise FleetError(
                f'the run "{self._name}" has other parameters than its plan: {self._parameters} instead of '
                f"{found['parameters']}; trigger a new run",
                code="approval-parameters-differ",
            )
        return found

    def _write(self, content: Mapping[str, Any]) -> None:
        self._path.parent.mkdir(0o700, parents=True, exist_ok=True)
        atomic_write(self._path, json.dumps(content), mode=0o600)


def forget_approvals(place: OrchestrationConfig, run: Any, steps: Iterable[str] = ("",)) -> None:
    """Remove the files of the steps of a run, at its end."""
    for step in steps:
        _path(place, run, step).unlink(missing_ok=True)


def is_cleared(context: Mapping[str, Any]) -> bool:
    """Whether a user cleared the run or the task, and so repeats the request of the user who triggered the run.

    Airflow does not count a clear that leaves the state of the run as it is, but allows the task more
    tries.
    """
    ti = context["ti"]
    return bool(context["dag_run"].clear_number) or ti.max_tries > ti.task.retries


def permitted_approvers(place: OrchestrationConfig, run: Any, *, self_approval: bool, cleared: bool) -> Collection[str]:
    """Return the configured approvers who may answer a run; empty if none are configured.

    Raises:
        FleetError: all configured approvers are the user who triggered the run, or the run was
            cleared.
    """
    if cleared and not self_approval:
        raise _run_cleared(run)
    found = [name for name in place.approvers if self_approval or not _may_be_same(name, run.triggering_user_name)]
    if place.approvers and not found:
        raise FleetError(
            f'nobody may approve this run: "{run.triggering_user_name}" triggered it, and is the only approver; add another one '
            f"to FLEET_APPROVERS, or let another user trigger the run",
            code="approver-none",
        )
    return found


def find_objection(
    place: OrchestrationConfig, run: Any, user: Mapping[str, Any] | None, *, self_approval: bool, cleared: bool
) -> FleetError | None:
    """Return why the approval of a user is not accepted; None if it is.

    Args:
        place: configuration of the installation.
        run: DAG run with ``run_type`` and ``triggering_user_name``; the latter is None if unknown.
        user: responder with ``id`` and ``name``, as Airflow's API has recorded it.
        self_approval: whether the user who triggered the run may approve it.
        cleared: whether the run was cleared, see `is_cleared`.
    """
    names = [str(user[key]) for key in ("name", "id") if user and user.get(key)]
    if not names:
        return FleetError("the approval has no user, so it is not accepted; answer as a user", code="approver-unknown")
    if place.approvers and not any(_same(name, listed) for name in names for listed in place.approvers):
        return FleetError(
            f'"{names[0]}" may not approve, so nothing was changed; approvers (FLEET_APPROVERS): {", ".join(place.approvers)}',
            code="approver-not-listed",
        )
    if self_approval:
        return None
    if cleared:
        return _run_cleared(run)
    if run.triggering_user_name is None:
        if run.run_type == _SCHEDULED:
            return None
        return FleetError(
            "the user who triggered the run is unknown; expected a user other than the approver; trigger the run in Airflow as "
            "a named user",
            code="approval-requester-unknown",
        )
    if any(_may_be_same(name, run.triggering_user_name) for name in names):
        return FleetError(
            f'"{names[0]}" triggered this run and cannot approve it, so nothing was changed; trigger it again, and let another '
            f"person approve",
            code="approval-own-run",
        )
    return None


def _run_cleared(run: Any) -> FleetError:
    return FleetError(
        f'the run "{run.dag_id} {run.run_id}" was cleared, and Airflow does not record by whom; expected a run that a named user '
        f"has triggered; trigger a new run",
        code="approval-run-cleared",
    )


def _same(one: str, other: str | None) -> bool:
    """Whether two user names are the same user; some auth managers ignore case."""
    return other is not None and one.strip().casefold() == other.strip().casefold()


def _may_be_same(one: str, other: str | None) -> bool:
    """Whether two user names may be accounts of one person: differences in case and Unicode form do not count."""
    return other is not None and _same(normalize("NFKC", one), normalize("NFKC", other))


def _path(place: OrchestrationConfig, run: Any, step: str) -> Path:
    name = sha256(json.dumps([run.dag_id, run.run_id, *([step] if step else [])]).encode()).hexdigest()[:32]
    return place.data_folder / "approvals" / f"{name}.json"
