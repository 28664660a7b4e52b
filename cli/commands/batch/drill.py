"""``fleet drill``: test that state operations change no verdict of a recording."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli.common.dry_run import DryRun, Read, print_dry_run
from cli.common.options import DryOption
from cli.common.output import as_json, as_table
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import Policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.times import parse_duration_ms
from fleetpulse.io.home.home import Home
from fleetpulse.reports.operations.agreement import Bag, differences, emitted

_SHOWN = 20
_PLACE = "fleet-drill-"
_COLUMNS = ("side", "kind", "device_id", "event_time_ms", "transition_no", "from_mode", "to_mode", "trigger", "reason")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("drill")(drill)


def drill(
    recording: Annotated[Path, typer.Argument(help="Recording: NDJSON, plain or gzip.")],
    lateness: Annotated[str, typer.Option("--lateness", help="Allowed lateness of messages.")] = "60s",
    keep: Annotated[bool, typer.Option("--keep", help="Keep both homes, and print their location.")] = False,
    dry_run: DryOption = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print the differences, one JSON object a line.")] = False,
) -> None:
    """Replay a recording with and without state operations; compare the verdicts.

    The second run stops several times, for one operation each: snapshot, migrate, repartition,
    rescale, roll back, and bootstrap from the snapshot. The verdicts of both runs must be equal.
    """
    deployment = Deployment(allowed_lateness_ms=parse_duration_ms(lateness))
    if dry_run:
        print_dry_run(_describe_dry_run(recording, keep=keep), json_lines=json_lines)
        return
    from batch.common.progress import Steps, watched
    from batch.common.spark_session import batch_session
    from batch.state.drill import STEPS, run_drill
    from cli.supervisor.replay import replay
    from fleetpulse.io.spark.session import SparkResources

    console = Console(stderr=True)

    def report(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    place = Path(tempfile.mkdtemp(prefix=_PLACE))
    first, second = Home(place / "undisturbed"), Home(place / "disturbed")
    try:
        report("run 1: undisturbed")
        replay(first, recording, Policy(), deployment, None)
        report("run 2: disturbed by state operations")
        second.prepare(first.deployment(), first.identity())
        steps = Steps(report)
        with batch_session(second, SparkResources()) as spark, watched(spark, steps):
            run_drill(spark, second, first, steps)
        expected, got = emitted(first), emitted(second)
    except BaseException:
        report(f"both homes are kept, with their logs: {place}")
        raise
    if keep or expected != got:
        report(f"both homes are kept: {place}")
    else:
        shutil.rmtree(place, ignore_errors=True)
    report_differences(recording, expected, got, json_lines=json_lines)
    typer.echo(f"the drill passed: {len(STEPS)} operations, {expected.total():,} judgements, no difference", err=json_lines)


def _describe_dry_run(recording: Path, *, keep: bool) -> DryRun:
    """Describe the steps of a drill, and the files that it reads and writes.

    Raises:
        FleetError: the recording does not exist, or is damaged, empty, or not in order.
    """
    from batch.state.drill import STEPS
    from fleetpulse.io.ingest.recording import inspect

    with Console(stderr=True).status("reading the recording"):
        played = inspect(recording)
    between = "; ".join(step.name for step in STEPS)
    does = f"judge a recording twice on Spark: once as it is, once in {len(STEPS) + 1} parts, and between them: {between}"
    until = "kept" if keep else "removed at the end if the verdicts agree"
    place = f'two homes in a new folder "{Path(tempfile.gettempdir()) / _PLACE}...", {until}'
    return DryRun(
        does, (Read(f'the recording "{recording}"', None, played.lines, None, played.first_ms, played.last_ms),), (place,)
    )


def report_differences(recording: Path, expected: Bag, got: Bag, *, json_lines: bool) -> None:
    """Print the judgements that only one of two runs emitted.

    Args:
        recording: replayed recording.
        expected: judgements of the undisturbed run, see `agreement.emitted`.
        got: judgements of the disturbed run.
        json_lines: whether to print all differences as JSON, one a line.

    Raises:
        FleetError: the runs differ, or neither emitted a judgement.
    """
    if not expected and not got:
        raise FleetError(
            f'the recording "{recording}" leads to no verdicts, so none were compared; use a longer one',
            code="drill-without-verdicts",
        )
    differ = [{**one, "side": "disturbed" if one["side"] == "emitted" else "undisturbed"} for one in differences(got, expected)]
    if not differ:
        return
    if json_lines:
        as_json(differ)
    else:
        columns = [name for name in differ[0] if name in _COLUMNS]
        Console(stderr=True).print(as_table(differ[:_SHOWN], columns, "differences"))
    raise FleetError(
        f"the drill found {len(differ)} differences in {expected.total():,} judgements; see the differences above",
        code="drill-differs",
    )
