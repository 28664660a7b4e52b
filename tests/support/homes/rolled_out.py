"""Home of a small fleet that gets firmware: devices of two classes that beat, fall silent or report errors on request."""

from collections.abc import Collection
from pathlib import Path

from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from tests.support.histories.histories import START, row, tick
from tests.support.homes.homes import RegisteredHome

BEAT_S = 20
TIMEOUT_S = 60
_RULES = {"timeout": f"{TIMEOUT_S}s", "death_grace": "5s", "degraded": {"errors": 3, "window": "5m"}, "longest_hold": "10m"}


class RolledOutHome(RegisteredHome):
    """Home whose devices beat each 20 s of event time, judged up to `now_s`.

    Args:
        path: folder of the home.
        pumps: number of pumps at the site ``north``; the first is ``pump-0``.
        others: number of sensors at the site ``south``.
    """

    def __init__(self, path: Path, pumps: int = 40, others: int = 10) -> None:
        super().__init__(path, Deployment(10_000))
        self.pumps = [f"pump-{number}" for number in range(pumps)]
        self.ids = [*self.pumps, *(f"sensor-{number}" for number in range(others))]
        self.now_s = 0
        content = parse_policy({"rules": _RULES, "classes": {"sensor": {"timeout": "90s"}}}).normalised()
        registered = [
            row(0.001, f"fleet/{self.site_of(name)}/{name}/registry", op="add", **{"class": name.split("-")[0]})
            for name in self.ids
        ]
        self.batch(row(0, "fleet/_/_/policy", policy=content, effective_from_s=0), *registered)
        self.run(60)

    @property
    def now_ms(self) -> int:
        """Event time of the newest beats, epoch milliseconds."""
        return START + self.now_s * 1_000

    def site_of(self, device_id: str) -> str:
        """Return the site of a device."""
        return "north" if device_id.startswith("pump") else "south"

    def run(self, seconds: int, *, silent: Collection[str] = (), faulty: Collection[str] = (), **payload: str) -> None:
        """Let time pass.

        Args:
            seconds: a multiple of 20.
            silent: devices that do not beat.
            faulty: devices that report an error with each beat.
            payload: further fields of each beat, such as ``firmware``.
        """
        rows: list[Row] = []
        for at_s in range(self.now_s + BEAT_S, self.now_s + seconds + 1, BEAT_S):
            for name in self.ids:
                beat = f"fleet/{self.site_of(name)}/{name}"
                if name not in silent:
                    rows.append(row(at_s, f"{beat}/heartbeat", ts_s=at_s, **payload))
                if name in faulty:
                    rows.append(row(at_s + 0.5, f"{beat}/error", ts_s=at_s + 0.5, code="overheat"))
            rows.append(tick(at_s + 1))
        self.now_s += seconds
        self.batch(*rows)
