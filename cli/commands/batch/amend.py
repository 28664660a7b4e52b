"""``fleet amend``: amend verdicts after late messages and registry corrections."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cli.common.options import DEFAULT_HOME, DryOption, HomeOption, RowsOption
from cli.common.output import as_json, as_table, console, report_progress
from fleetpulse.core.errors import Misuse
from fleetpulse.core.times import format_instant, parse_duration_ms, parse_instant_ms
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import in_use

if TYPE_CHECKING:
    from batch.amend import Amended

_COLUMNS = ("device_id", "retracted", "added", "corrected", "left")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("amend")(amend)


def amend(
    home: HomeOption = DEFAULT_HOME,
    device: Annotated[list[str] | None, typer.Option("--device", help="Amend only this device; repeatable.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Late messages received since this instant; by default since the last amend.")
    ] = None,
    dry_run: DryOption = False,
    again_within: Annotated[
        str | None,
        typer.Option(
            "--again-within", help="After corrections, wait up to this duration until they are judged, and amend again."
        ),
    ] = None,
    json_lines: RowsOption = False,
) -> None:
    """Replay devices with late messages, and amend their verdicts.

    Transitions that did not happen are retracted, and missing ones are added. A device whose
    current mode is wrong is corrected. Devices with corrected registry entries are replayed, too.
    """
    from batch.amend import AmendRequest, amend_and_settle, amend_home
    from fleetpulse.reports.judgements import require_known

    opened = Home(home)
    opened.record()
    for device_id in device or ():
        require_known(opened, device_id)
    request = AmendRequest(tuple(dict.fromkeys(device or ())), None if since is None else _past(parse_instant_ms(since)), dry_run)
    if again_within is None:
        done = amend_home(opened, request, report_progress)
    else:
        done = amend_and_settle(opened, request, _FrontierWait(opened, parse_duration_ms(again_within) / 1000), report_progress)
    if json_lines:
        as_json([asdict(one) for one in done])
    else:
        _show(done, opened, dry_run=dry_run)


def _past(since_ms: int) -> int:
    """Return an instant; raise if it is in the future."""
    if since_ms > time.time() * 1000:
        raise Misuse(
            f"--since must be an instant in the past; got {format_instant(since_ms)}; name an earlier instant",
            code="instant-not-past",
        )
    return since_ms


@dataclass(frozen=True, slots=True)
class _FrontierWait:
    """Wait until the frontier has passed an instant.

    Waiting ends at a time limit, or as soon as neither a run nor a service is active.

    Attributes:
        home: home of the fleet.
        within_s: time limit, seconds.
    """

    home: Home
    within_s: float

    def __call__(self, instant_ms: int) -> bool:
        from batch.common.progress import Paced

        limit, progress = time.monotonic() + self.within_s, Paced(report_progress)
        while not (reached := self._is_past(instant_ms)) and in_use(self.home) and time.monotonic() < limit:
            progress(self._progress)
            time.sleep(1)
        return reached

    def _is_past(self, instant_ms: int) -> bool:
        at_ms = self._reached_ms()
        return at_ms is not None and at_ms > instant_ms

    def _reached_ms(self) -> int | None:
        from fleetpulse.reports.frontiers import frontier_ms

        judged = judged_up_to(self.home.checkpoint)
        return frontier_ms(self.home, judged[1]) if judged is not None else None

    def _progress(self) -> str:
        at_ms = self._reached_ms()
        return f"waiting: judged {'is nothing yet' if at_ms is None else f'up to {format_instant(at_ms)}'}"


def _show(done: Sequence["Amended"], home: Home, *, dry_run: bool) -> None:
    shown = console()
    changed = [asdict(one) for one in done if one.retracted or one.added or one.left]
    if changed:
        title = "planned amendments" if dry_run else "amended"
        shown.print(as_table(changed, _COLUMNS, title))
    retracted, added = sum(one.retracted for one in done), sum(one.added for one in done)
    corrected = sum(one.corrected for one in done)
    shown.print(
        f"devices replayed: {len(done):,}; transitions retracted: {retracted:,}, added: {added:,}; corrected: {corrected:,}"
    )
    if corrected and not dry_run and not in_use(home):
        shown.print("the corrections take effect when the fleet runs (./fleet up)")
