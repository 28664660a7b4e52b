"""``fleet amend``: late messages and corrected entries of the registry, replayed."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cli.common.options import DEFAULT_HOME, DryOption, HomeOption, RowsOption
from cli.common.output import as_json, as_table, console, say
from fleetpulse.core.errors import Misuse
from fleetpulse.core.times import format_instant, parse_duration_ms, parse_instant_ms
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import in_use

if TYPE_CHECKING:
    from batch.amend import Amended

_COLUMNS = ("device_id", "retracted", "added", "corrected", "left")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("amend")(amend)


def amend(
    home: HomeOption = DEFAULT_HOME,
    device: Annotated[list[str] | None, typer.Option("--device", help="This device; may be given several times.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="What was received since an instant; otherwise since the last amend.")
    ] = None,
    dry_run: DryOption = False,
    again_within: Annotated[
        str | None,
        typer.Option(
            "--again-within", help="Where something was corrected, wait so long for that to be judged, and amend again."
        ),
    ] = None,
    json_lines: RowsOption = False,
) -> None:
    """Judge anew what late messages concern: take back what did not happen, add what did, correct who stands wrong."""
    from batch.amend import AmendRequest, amend_and_settle, amend_home
    from fleetpulse.reports.judgements import require_known

    opened = Home(home)
    opened.record()
    for device_id in device or ():
        require_known(opened, device_id)
    wanted = AmendRequest(tuple(dict.fromkeys(device or ())), None if since is None else _past(parse_instant_ms(since)), dry_run)
    if again_within is None:
        done = amend_home(opened, wanted, say)
    else:
        done = amend_and_settle(opened, wanted, _Judged(opened, parse_duration_ms(again_within) / 1000), say)
    if json_lines:
        as_json([asdict(one) for one in done])
    else:
        _show(done, opened, dry_run=dry_run)


def _past(since_ms: int) -> int:
    """Return an instant, unless it lies in the future."""
    if since_ms > time.time() * 1000:
        raise Misuse(
            f"--since is an instant of the past; got {format_instant(since_ms)}; what is to come is amended when it came",
            code="instant-not-past",
        )
    return since_ms


@dataclass(frozen=True, slots=True)
class _Judged:
    """Waits until all up to an instant is judged, while the fleet runs, and no longer than so many seconds."""

    home: Home
    within_s: float

    def __call__(self, instant_ms: int) -> bool:
        from batch.common.progress import Paced

        limit, far = time.monotonic() + self.within_s, Paced(say)
        while not (reached := self._is_past(instant_ms)) and in_use(self.home) and time.monotonic() < limit:
            far(self._how_far)
            time.sleep(1)
        return reached

    def _is_past(self, instant_ms: int) -> bool:
        at_ms = self._reached_ms()
        return at_ms is not None and at_ms > instant_ms

    def _reached_ms(self) -> int | None:
        from fleetpulse.reports.judgements import frontier_ms

        judged = judged_up_to(self.home.checkpoint)
        return frontier_ms(self.home, judged[1]) if judged is not None else None

    def _how_far(self) -> str:
        at_ms = self._reached_ms()
        return f"waiting: judged {'is nothing yet' if at_ms is None else f'up to {format_instant(at_ms)}'}"


def _show(done: Sequence["Amended"], home: Home, *, dry_run: bool) -> None:
    shown = console()
    changed = [asdict(one) for one in done if one.retracted or one.added or one.left]
    if changed:
        title = "what would be amended" if dry_run else "amended"
        shown.print(as_table(changed, _COLUMNS, title))
    retracted, added = sum(one.retracted for one in done), sum(one.added for one in done)
    corrected = sum(one.corrected for one in done)
    shown.print(
        f"devices looked at: {len(done):,}; transitions taken back: {retracted:,}, added: {added:,}; corrected: {corrected:,}"
    )
    if corrected and not dry_run and not in_use(home):
        shown.print("what corrects takes effect when the fleet runs (./fleet up)")
