"""``fleet replay``: play a recording through the pipeline until all is judged."""

import secrets
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cli.supervisor.processes import Run
from cli.supervisor.progress import judged_to_the_end
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import Policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import EVERYONE
from fleetpulse.core.times import format_instant
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest import recording
from fleetpulse.io.ingest.recording import RecordedMessage, Recording
from fleetpulse.io.ingest.segments import BridgePosition, bridge_position
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.planning.model import first_key_groups
from fleetpulse.settings import load_settings
from streaming.simulator.replay_publisher import play

_PATIENCE_S = 600.0


def policy_line(policy: Policy, received_at_ms: int, *, first_ever: bool) -> RecordedMessage:
    """Return the policy as the first line of a recording.

    If it is the first row of the home, it applies to all rows that the home ever judges. Otherwise
    it applies from that line on, because earlier rows stay judged.
    """
    import json

    content = {"policy": policy.normalised(), "effective_from": 0 if first_ever else received_at_ms}
    return RecordedMessage(
        received_at_ms, f"fleet/{EVERYONE}/{EVERYONE}/policy", json.dumps(content, separators=(",", ":")).encode()
    )


def replay(home: Home, path: Path, policy: Policy, deployment: Deployment | None, broker: BrokerAddress | None) -> None:
    """Play a recording into a home and judge it to the end, or resume an unfinished replay.

    Raises:
        FleetError: the recording is invalid, the home cannot take it, or a process ended.
    """
    console = Console(stderr=True)
    with console.status("reading the recording"):
        played = recording.inspect(path)
    settings = load_settings(home.path)
    home.prepare(deployment, settings.chosen_identity(), first_key_groups(settings.task_cores), settings.files())
    bridges = settings.all_bridges()
    with home.locked("fleet replay"):
        home.divide(bridges)
        position = bridge_position(home.segments)
        _check(home, played, policy, position)
        home.remember(played.id, {"policy_version": policy.version, "lines": played.lines + 1})
        if not _is_judged(home, played):
            _run(home, played, policy, position, broker, console)


def _check(home: Home, played: Recording, policy: Policy, position: BridgePosition | None) -> None:
    """Refuse a recording that would mix histories.

    Raises:
        FleetError: the home has newer rows, an unfinished other recording, or this recording under
            another policy.
    """
    known: dict[str, Any] = home.record()["recordings"].get(played.id, {})
    if known and known["policy_version"] != policy.version:
        raise FleetError(
            f'"{home.path}" already judges this recording by policy {known["policy_version"]}; got policy {policy.version}; '
            f"pass the same --timeout and --policy as before, or another --home",
            code="replay-policy-differs",
        )
    if position is None or played.id in (position.recording, position.played):
        return
    if position.recording is not None and not position.ended:
        raise FleetError(
            f'another recording ({position.recording}) is only partly played in "{home.path}"; finish it, or pass another --home',
            code="replay-recording-differs",
        )
    if position.received_at_ms >= played.first_ms:
        raise FleetError(
            f'the home "{home.path}" has rows received up to {format_instant(position.received_at_ms)}; expected a recording '
            f"that starts later, got one that starts at {format_instant(played.first_ms)}; pass an empty --home",
            code="replay-behind-home",
        )


def _is_judged(home: Home, played: Recording) -> bool:
    """Whether the recording has been played, landed and judged to its last row."""
    position = bridge_position(home.segments)
    return position is not None and position.played == played.id and judged_to_the_end(home)


def _run(
    home: Home,
    played: Recording,
    policy: Policy,
    position: BridgePosition | None,
    broker: BrokerAddress | None,
    console: Console,
) -> None:
    total = played.lines + 1
    first = position.line + 1 if position and position.recording == played.id and position.line is not None else 0
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Run(home) as run, Progress(*columns, console=console) as progress:
        run.start("lifecycle")  # first: the JVM starts slowly
        address = run.use_broker(broker)
        run.start("landing")
        run.start("bridge", ["--replay", "--not-live"])
        run.await_that("connecting the bridge", lambda: run.status("bridge").get("subscribed") is True, 60)
        bars = {name: progress.add_task(name, total=total) for name in ("published", "landed", "judged")}
        opening = policy_line(policy, played.first_ms, first_ever=position is None)
        _publish(run, address, played, opening, first, lambda line: progress.update(bars["published"], completed=line))
        progress.update(bars["published"], completed=total)

        def judged() -> bool:
            _show(run, progress, bars, played, total)
            return _is_judged(home, played)

        run.await_that("judging the recording", judged, _PATIENCE_S)
        for bar in bars.values():
            progress.update(bar, completed=total)


def _publish(run: Run, address: BrokerAddress, played: Recording, opening: RecordedMessage, first: int, on_progress: Any) -> None:
    def history() -> Iterator[RecordedMessage]:
        return chain([opening], recording.read(played.path))

    def watched(line: int) -> None:
        run.watch()
        on_progress(line)

    def ended() -> bool:
        run.watch()  # detects a dead broker at once, instead of after the publisher's timeout
        return False

    with Publisher(address, f"fleetpulse-replay-{secrets.token_hex(8)}", cancelled=ended) as publisher:
        play(history(), played.id, publisher, first_line=first, on_progress=watched)


def _show(run: Run, progress: Progress, bars: dict[str, Any], played: Recording, total: int) -> None:
    landed = run.status("landing").get("line")
    if isinstance(landed, int):
        progress.update(bars["landed"], completed=min(landed, total))
    reached = judged_up_to(run.home.checkpoint)
    span = max(1, played.last_ms - played.first_ms)
    if reached and reached[1] >= played.first_ms:
        share = min(1.0, (reached[1] - played.first_ms) / span)
        progress.update(bars["judged"], completed=int(share * total))
