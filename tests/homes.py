"""Homes for tests: rows as landing would have left them, without a broker or a job."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from fleetpulse.core.messages import Row, hash64
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io import delta
from fleetpulse.io.home import Home


def landed_home(path: Path, rows: Sequence[Row], deployment: Deployment, cuts: Sequence[int] = ()) -> Home:
    """Make a home with rows in bronze.

    Args:
        path: of the home.
        rows: in the order of ``received_at``.
        deployment: lateness, clock lead and jitter.
        cuts: after how many rows a version ends.
    """
    home = Home(path)
    home.prepare(deployment)
    delta.create(home, MESSAGES)
    edges = [0, *sorted(cuts), len(rows)]
    for number, (begin, end) in enumerate(pairwise(edges), 1):
        arrival = {"origin": "replay", "bridge": "b", "segment": number}
        table = [{**asdict(one), "device_hash": hash64(one.device_id), **arrival} for one in rows[begin:end]]
        delta.append(home, MESSAGES, delta.to_table(MESSAGES, table), "test", number)
    return home
