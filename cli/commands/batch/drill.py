"""``fleet drill``: all that can be done to the state, done to a recorded fleet, and the verdicts compared."""

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
from fleetpulse.reports.agreement import Bag, differences, emitted

_SHOWN = 20
_PLACE = "fleet-drill-"
_COLUMNS = ("side", "kind", "device_id", "event_time_ms", "transition_no", "from_mode", "to_mode", "trigger", "reason")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("drill")(drill)


def drill(
    recording: Annotated[Path, typer.Argument(help="gzip or plain NDJSON.")],
    lateness: Annotated[str, typer.Option("--lateness", help="How late a message may come and be judged.")] = "60s",
    keep: Annotated[bool, typer.Option("--keep", help="Keep both homes, and say where they are.")] = False,
    dry_run: DryOption = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Differences as JSON, one a line.")] = False,
) -> None:
    """Judge a recording twice, once undisturbed, once while its state is moved about; the verdicts must be the same.

    Between the parts of the second run: snapshot, migrate, repartition, rescale, roll back, bootstrap from the snapshot.
    """
    deployment = Deployment(allowed_lateness_ms=parse_duration_ms(lateness))
    if dry_run:
        print_dry_run(_outlook(recording, keep=keep), json_lines=json_lines)
        return
    from batch.common.progress import Steps, watched
    from batch.common.spark_session import batch_session
    from batch.state.drill import STEPS, disturbed
    from cli.supervisor.replay import replay
    from fleetpulse.io.spark.session import SparkResources

    console = Console(stderr=True)

    def say(words: str) -> None:
        console.print(words, highlight=False, soft_wrap=True)

    place = Path(tempfile.mkdtemp(prefix=_PLACE))
    first, second = Home(place / "undisturbed"), Home(place / "disturbed")
    try:
        say("the undisturbed run")
        replay(first, recording, Policy(), deployment, None)
        say("the disturbed run")
        second.prepare(first.deployment(), first.identity())
        steps = Steps(say)
        with batch_session(second, SparkResources()) as spark, watched(spark, steps):
            disturbed(spark, second, first, steps)
        want, got = emitted(first), emitted(second)
    except BaseException:
        say(f"both homes are kept, with their logs: {place}")
        raise
    if keep or want != got:
        say(f"both homes are kept: {place}")
    else:
        shutil.rmtree(place, ignore_errors=True)
    conclude(recording, want, got, json_lines=json_lines)
    typer.echo(f"the drill passed: {len(STEPS)} operations, {want.total():,} judgements, no difference", err=json_lines)


def _outlook(recording: Path, *, keep: bool) -> DryRun:
    """Return what a drill would do.

    Raises:
        FleetError: the recording is not there, damaged, empty, or not in order.
    """
    from batch.state.drill import STEPS
    from fleetpulse.io.ingest.recording import inspect

    with Console(stderr=True).status("reading the recording"):
        played = inspect(recording)
    between = "; ".join(step.name for step in STEPS)
    does = f"judge a recording twice on Spark: once as it is, once in {len(STEPS) + 1} parts, and between them: {between}"
    until = "kept" if keep else "removed at the end where the verdicts agree"
    place = f'two homes in a new folder "{Path(tempfile.gettempdir()) / _PLACE}...", {until}'
    return DryRun(
        does, (Read(f'the recording "{recording}"', None, played.lines, None, played.first_ms, played.last_ms),), (place,)
    )


def conclude(recording: Path, want: Bag, got: Bag, *, json_lines: bool) -> None:
    """Tell what only one of two runs said.

    Args:
        recording: that was judged.
        want: what the undisturbed run said, see `agreement.emitted`.
        got: what the disturbed one said.
        json_lines: whether differences are told as JSON, one a line, and all of them.

    Raises:
        FleetError: they differ, or neither said anything.
    """
    if not want and not got:
        raise FleetError(
            f'"{recording}" gives no verdict at all: nothing was compared; take a longer one', code="drill-without-verdicts"
        )
    differ = [{**one, "side": "disturbed" if one["side"] == "told" else "undisturbed"} for one in differences(got, want)]
    if not differ:
        return
    if json_lines:
        as_json(differ)
    else:
        columns = [name for name in differ[0] if name in _COLUMNS]
        Console(stderr=True).print(as_table(differ[:_SHOWN], columns, "differences"))
    raise FleetError(
        f"the drill found {len(differ)} differences in {want.total():,} judgements; the first are shown", code="drill-differs"
    )
