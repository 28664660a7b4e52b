"""Sessions and data-quality gates for the commands of ``fleet state``."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cli.common.output import report_progress
from cli.common.session_size import session_resources_of
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.io.checkpoints.checkpoint import relocate_each
from fleetpulse.io.checkpoints.generations import require_none_held
from fleetpulse.io.home.checkpoint_ownership import require_own, require_own_if_readable
from fleetpulse.io.home.exclusive import exclusive_state_change
from fleetpulse.io.home.home import Home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from batch.state.operations import StateOperation
    from batch.state.snapshot import Gate
    from fleetpulse.io.checkpoints.generations import Generation


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Options of a command that replaces the state.

    Attributes:
        dry: whether to print the plan only and change nothing.
        hold: whether to hold the new generation until it is switched to.
        as_json: whether to print the new generation as JSON.
        once_stopped: with ``dry``: whether to plan as if the running job were stopped.
        gate: whether the new generation must pass the data-quality gate.
        damaged: whether the current state cannot be read.

    Raises:
        Misuse: options exclude each other.
    """

    dry: bool
    hold: bool
    as_json: bool
    once_stopped: bool
    gate: bool = False
    damaged: bool = False

    def __post_init__(self) -> None:
        if self.once_stopped and not self.dry:
            raise Misuse(
                "--once-stopped has an effect only in a dry run; add --dry-run, or omit --once-stopped",
                code="option-conflict",
            )
        if self.dry and self.as_json:
            raise Misuse("--json prints the new generation, and --dry-run makes none; omit one of them", code="option-conflict")


@contextmanager
def read_session(path: Path, *, dry: bool = False) -> "Iterator[StateOperation]":
    """Open a session that only reads the state of a home."""
    home = Home(path.absolute())  # executors have other working directories
    home.record()
    with _session(home, dry=dry, changes=False) as work:
        yield work


@contextmanager
def change_session(path: Path, verb: str, options: StateOptions) -> "Iterator[StateOperation]":
    """Open a session that holds the state of a home, to replace it.

    A dry run is refused in the same cases.
    """
    home = Home(path.absolute())  # executors have other working directories
    home.record()
    require_none_held(home.lifecycle)
    if options.dry:
        if not options.once_stopped:
            home.require_state_free()
        with _session(home, dry=True, changes=False, damaged=options.damaged) as work:
            yield work
        return
    by = f"fleet state {verb}"
    gate = _state_gate(home) if options.gate else None
    session = _session(home, dry=False, changes=True, damaged=options.damaged)
    with exclusive_state_change(home, by, report_progress), home.state_held(by), session as work:
        yield replace(work, holds=options.hold, gate=gate)


@contextmanager
def _session(home: Home, *, dry: bool, changes: bool, damaged: bool = False) -> "Iterator[StateOperation]":
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from batch.common.progress import Steps, watched
    from batch.common.spark_session import batch_session, cause_of, plainly_named
    from batch.state.operations import StateOperation

    (require_own_if_readable if damaged else require_own)(home, home.generation().number)
    relocate_each(home.lifecycle)  # the home may have been moved
    steps = Steps(report_progress)
    with plainly_named(home) as named, ExitStack() as stack:

        @cache
        def session() -> "SparkSession":
            steps("starting Spark")
            spark = stack.enter_context(batch_session(named, session_resources_of(home)))
            if not dry:  # the output of a dry run is its result, so it prints no progress
                stack.enter_context(watched(spark, steps))
            return spark

        try:
            yield StateOperation(session, named, steps, dry)
        except (PySparkException, Py4JError) as error:
            recovery = f"recover from a snapshot: ./fleet state bootstrap --damaged --home {home.path}"
            advice = f"if it is damaged, {recovery}" if changes else "the job may have advanced meanwhile: try again"
            raise FleetError(
                f"generation {home.generation().number} cannot be read ({cause_of(error)}); nothing has changed; "
                f'details: "{home.logs / "batch.log"}"; {advice}',
                code="generation-unreadable",
            ) from error


def snapshot_gate(work: "StateOperation") -> "Gate":
    """Return the data-quality gate for a snapshot, applied before it is published.

    Raises:
        FleetError: Great Expectations is not installed.
    """
    keep = _quality_runs_to_keep(work.home)
    from batch.quality.gate import gate_snapshot_rows

    return lambda rows, info: gate_snapshot_rows(work.spark, work.home, rows, info, keep, work.report)


def _state_gate(home: Home) -> "Callable[[StateOperation, Generation], None]":
    """Return the data-quality gate for a generation, applied before it is activated.

    Raises:
        FleetError: Great Expectations is not installed.
    """
    keep = _quality_runs_to_keep(home)

    def check_generation(work: "StateOperation", generation: "Generation") -> None:
        from batch.quality.gate import gate_generation

        gate_generation(work.spark, work.home, generation, keep, work.report)

    return check_generation


def _quality_runs_to_keep(home: Home) -> int:
    from cli.common.extras import require_installed

    require_installed()
    from fleetpulse.settings import load_settings

    return load_settings(home.path).keep_quality_runs
