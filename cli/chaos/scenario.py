"""Sequence of a run of chaos: start, load, kill, drain, and count."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from cli.chaos.kills import KillExecutor
from cli.chaos.ledger import Account, account
from cli.chaos.load import PATIENCE_S, Load
from cli.chaos.reconnecting import LATENESS_MS, ReconnectingDevices
from cli.chaos.targets import OF_JOBS, KillKind
from cli.supervisor.processes import Run
from cli.supervisor.progress import judged_to_the_end
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import BRIDGE, EVERYONE
from fleetpulse.core.tables import MESSAGES
from fleetpulse.core.times import format_instant
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.command_spool import spool
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.segments import bridge_position
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.spark.standalone import StandaloneCluster
from fleetpulse.io.system.process import StopSignal
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.reports import frontiers
from streaming.landing.landing import landed_places
from streaming.landing.merge import MAX_SEGMENT_ROWS

TIMEOUT_S: Final = 10
GRACE_S: Final = 3  # grace period after a will
OUTAGE_S: Final = 13.0  # longer than the timeout
_DRAIN_S: Final = 600.0
_START_S: Final = 600.0
_POLL_S: Final = 0.5
_SPARE: Final = 5  # restarts of a job in addition to its kills, as many as ``fleet up`` allows
_SETTINGS: Final = """# settings of ./fleet chaos: intervals of seconds instead of minutes
canary_interval = "1s"
reconnect_grace = "5s"
flood_limit = 0
flood_bytes = 0
"""


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """Options of a run of chaos.

    Attributes:
        rounds: number of rounds, each with one kill of each kind, in random order.
        seed: seed of order, instants and load.
        rate_per_s: messages a second.
        devices: number of devices that send them, in turn.
        reconnecting: number of further devices that lose their connections and reconnect, see
            `cli.chaos.reconnecting`.
        victims: kinds of kill.
        pause_s: mean time between two kills, in seconds.
        keep: whether to keep the home.
        cluster: whether the tasks of the lifecycle job run on a Spark cluster, which is started.
    """

    rounds: int
    seed: int
    rate_per_s: float
    devices: int
    reconnecting: int
    victims: tuple[KillKind, ...]
    pause_s: float
    keep: bool = False
    cluster: bool = False


ReportProgress = Callable[[str], None]


def chaos(plan: ChaosPlan, report: ReportProgress) -> Account:
    """Run chaos in a temporary home, and return the results.

    Args:
        plan: options of the run.
        report: receiver of progress messages, one line each.

    Raises:
        FleetError: a process did not start or recover, or the load was not judged in time. The home
            is kept.
        KeyboardInterrupt: a stop was requested.
    """
    home = Home(Path(tempfile.mkdtemp(prefix="fleet-chaos-")).resolve())
    keep = plan.keep
    try:
        (home.path / "settings.toml").write_text(_SETTINGS)
        home.prepare(Deployment(LATENESS_MS))
        with home.locked("fleet chaos"), _cluster_of(plan, home) as cluster:
            found = _run(plan, home, report, cluster)
        keep = keep or not found.clean
        return found
    except FleetError:
        keep = True
        raise
    finally:
        if keep:
            report(f'the home is kept: "{home.path}"')
        else:
            shutil.rmtree(home.path, ignore_errors=True)


@contextmanager
def _cluster_of(plan: ChaosPlan, home: Home) -> Iterator[StandaloneCluster | None]:
    """Run a Spark cluster for the home, if it is requested, and write the settings that name it."""
    if not plan.cluster:
        yield None
        return
    with StandaloneCluster(home.path / "cluster", home.path / "spark.key") as cluster:
        with (home.path / "settings.toml").open("a") as settings:
            settings.writelines(f"{name} = {json.dumps(value)}\n" for name, value in cluster.settings().items())
        yield cluster


def _run(plan: ChaosPlan, home: Home, report: ReportProgress, cluster: StandaloneCluster | None) -> Account:
    stop, random = StopSignal().on_signals(), Random(plan.seed)
    restarts = plan.rounds + _SPARE
    try:
        with Run(home) as run:
            address = _start(run, restarts, stop)
            with Load(address, plan.devices, plan.rate_per_s, plan.seed) as load:
                run.await_that("the first verdicts", lambda: _frontier_ms(home) is not None or _ended(stop), _START_S)
                killing = KillExecutor(run, random, stop, OUTAGE_S, cluster)
                with ReconnectingDevices(address, plan.reconnecting, plan.seed) as others:  # none is late without a frontier
                    _kill(plan, killing, load, random, report)
                    report("the load has ended; waiting until its last messages are judged")
                _drain(killing, load, run)
            died = sum(job.died for job in run.jobs)
    finally:
        stop.close()
    report("counting")
    unexpected_exits = died - sum(kill.victim in OF_JOBS for kill in killing.kills)
    heard, limits = [*load.acknowledged, *others.acknowledged], {"timeout_ms": TIMEOUT_S * 1000, "death_grace_ms": GRACE_S * 1000}
    return account(home, heard, killing.kills, reconnects=others.reconnects, unexpected_exits=unexpected_exits, **limits)


def _start(run: Run, restarts: int, stop: StopSignal) -> BrokerAddress:
    """Start the processes of ``fleet up`` in its order, with a short timeout."""
    policy = parse_policy({"rules": {"timeout": f"{TIMEOUT_S}s", "death_grace": f"{GRACE_S}s"}}).normalised()
    spool(run.home, [(f"fleet/{EVERYONE}/{EVERYONE}/policy", {"policy": policy, "effective_from": 0})])
    address = run.use_broker(None)
    assert run.broker is not None, "it was just started"
    run.broker.port = address.port  # it restarts on the same port after a kill
    for name in ("lifecycle", "landing", "bridge"):
        run.start(name, restarts=restarts)
    run.await_that("connecting the bridge", lambda: run.status("bridge").get("subscribed") is True or _ended(stop), _START_S)
    return address


def _ended(stop: StopSignal) -> bool:
    if stop.is_set():
        raise KeyboardInterrupt
    return False


def _kill(plan: ChaosPlan, killing: KillExecutor, load: Load, random: Random, report: ReportProgress) -> None:
    for number in range(1, plan.rounds + 1):
        for victim in random.sample(plan.victims, len(plan.victims)):
            killing.tend(random.uniform(0, 2 * plan.pause_s))
            load.check()
            report(f"round {number} of {plan.rounds}: {victim.value}, {len(load.acknowledged):,} messages acknowledged")
            killing.kill(victim)
    killing.await_recovery()


def _drain(killing: KillExecutor, load: Load, run: Run) -> None:
    """Wait until all messages are judged, stop the bridge, and wait for its last rows.

    Raises:
        FleetError: a wait took too long, or landing or the lifecycle job ended.
    """
    load.end()
    _await("the last messages were not acknowledged", PATIENCE_S, load.finished, killing, run)
    ended_ms = wall_clock_ms()

    def judged() -> bool:
        frontier_ms = _frontier_ms(run.home)
        return frontier_ms is not None and frontier_ms > ended_ms

    _await("the last messages were not judged", _DRAIN_S, judged, killing, run)
    run.stop("bridge")
    limit_s = time.monotonic() + _DRAIN_S
    while not judged_to_the_end(run.home):
        if time.monotonic() > limit_s or not (run.alive("landing") and run.alive("lifecycle")):
            raise FleetError(f"the last rows were not judged; {_position_text(run.home)}", code="rows-not-judged")
        killing.rest(_POLL_S)


def _frontier_ms(home: Home) -> int | None:
    """Return the frontier; None before the second batch."""
    reached = judged_up_to(home.checkpoint)
    return None if reached is None else frontiers.frontier_ms(home, reached[1])


def _await(what: str, patience_s: float, reached: Callable[[], bool], killing: KillExecutor, run: Run) -> None:
    limit_s = time.monotonic() + patience_s
    while not reached():
        if time.monotonic() > limit_s:
            raise FleetError(f"{what} within {patience_s:.0f} s; {_position_text(run.home)}", code="wait-timeout")
        killing.tend(_POLL_S)


def _position_text(home: Home) -> str:
    written, reached = bridge_position(home.segments), judged_up_to(home.checkpoint)
    landed = landed_places(home, MESSAGES)[BRIDGE] // MAX_SEGMENT_ROWS
    return (
        f"the bridge has written segment {written.number if written else 0}, segment {landed} is landed, judged up to: "
        f'{format_instant(reached[1]) if reached else "nothing"}; see the logs in "{home.logs}"'
    )
