"""``fleet drill``: all that can be done to the state, done to a recorded fleet, and the verdicts compared."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli.output import as_json, as_table
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import Policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.times import parse_duration_ms
from fleetpulse.io.home import Home
from fleetpulse.ops.agreement import differences, told

_SHOWN = 20
_COLUMNS = ("side", "kind", "device_id", "event_time_ms", "transition_no", "from_mode", "to_mode", "trigger", "reason")


def drill(
    recording: Annotated[Path, typer.Argument(help="gzip or plain NDJSON.")],
    lateness: Annotated[str, typer.Option("--lateness", help="How late a message may come and be judged.")] = "60s",
    keep: Annotated[bool, typer.Option("--keep", help="Keep both homes, and say where they are.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Differences as JSON, one a line.")] = False,
) -> None:
    """Judge a recording twice, once undisturbed, once while its state is moved about; the verdicts must be the same.

    Between the parts of the second run: snapshot, migrate, repartition, rescale, roll back, bootstrap from the snapshot.
    """
    from batch.drill import STEPS, disturbed
    from batch.session import batch_session
    from cli.replaying import replay
    from fleetpulse.io.spark import Size

    console = Console(stderr=True)

    def say(words: str) -> None:
        console.print(words, highlight=False, soft_wrap=True)

    place = Path(tempfile.mkdtemp(prefix="fleet-drill-"))
    first, second = Home(place / "undisturbed"), Home(place / "disturbed")
    try:
        say("the undisturbed run")
        replay(first, recording, Policy(), Deployment(allowed_lateness_ms=parse_duration_ms(lateness)), None)
        say("the disturbed run")
        second.prepare(first.deployment())
        with batch_session(second, Size()) as spark:
            disturbed(spark, second, first, say)
        want, got = told(first), told(second)
        differ = [{**one, "side": "disturbed" if one["side"] == "told" else "undisturbed"} for one in differences(got, want)]
    except BaseException:
        say(f"both homes are kept, with their logs: {place}")
        raise
    if keep or differ:
        say(f"both homes are kept: {place}")
    else:
        shutil.rmtree(place, ignore_errors=True)
    if not want:
        raise FleetError(f'"{recording}" gives no verdict at all: nothing was compared; take a longer one')
    if differ:
        if json_lines:
            as_json(differ)
        else:
            console.print(as_table(differ[:_SHOWN], [name for name in differ[0] if name in _COLUMNS], "differences"))
        raise FleetError(f"the drill found {len(differ)} differences in {sum(want.values()):,} judgements; the first are shown")
    typer.echo(f"the drill passed: {len(STEPS)} operations, {sum(want.values()):,} judgements, no difference", err=json_lines)
