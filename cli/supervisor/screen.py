"""Live screen of ``fleet up``: devices by mode, message rate, frontier, verdicts."""

import io
import re
import time
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cli.common.output import MODE_COLOURS, TRANSITION_COLUMNS, as_table
from cli.supervisor.processes import Run, disk_full
from fleetpulse.core.errors import FleetError
from fleetpulse.core.monitoring.health import problems_of
from fleetpulse.core.tables import JUDGEMENTS, QUARANTINE
from fleetpulse.core.times import format_duration, format_instant
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.home.home import PUBLISHER, bridge_job
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.embedded import broker_log
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables.tables import Mirror
from fleetpulse.reports import frontiers, judgements
from fleetpulse.reports.present import devices

_REFRESH_S = 2.0  # interval of reads of the tables before the first verdict, and after a failed read
_REFRESH_RUNNING_S = 15.0  # interval after the first verdict: each read loads the new rows of the tables
_LAST = 12
_PICTURE_COLUMNS = 118


class Screen:
    """Figures of a run, as a screen or as one line.

    The tables are read every two seconds until the first verdict, and less often afterwards.
    """

    def __init__(self, run: Run, address: BrokerAddress) -> None:
        self.run = run
        self.address = address
        self.began = time.monotonic()
        self._read_at = float("-inf")
        only = {QUARANTINE.name: ("reason", "messages")}  # without the refused payloads
        self._mirror = Mirror(
            run.home, devices.COUNTED, only, {JUDGEMENTS.name: "kind != 'summary'"}
        )  # there is up to one summary per key group and batch
        self._read_error = ""
        self._counts: dict[str, Any] = {"devices": {}, "messages": 0, "judgements": {}, "quarantine": {}}
        self._last: list[dict[str, Any]] = []
        self._frontier_ms: int | None = None
        self.first_verdict_s: float | None = None

    def _refresh(self) -> None:
        from duckdb import Error  # already loaded by the mirror

        settled = self.first_verdict_s is not None and not self._read_error
        if time.monotonic() - self._read_at < (_REFRESH_RUNNING_S if settled else _REFRESH_S):
            return
        self._read_at = time.monotonic()
        try:
            self._read_tables()
            self._read_error = ""
        except (Error, FleetError, OSError) as error:  # the run continues even if its figures cannot be read
            self._read_error = f"the figures are stale: {str(error).splitlines()[0]}"

    def _read_tables(self) -> None:
        home = self.run.home
        self._mirror.refresh()
        self._frontier_ms = frontiers.frontier_ms(home, judged_ms(home.checkpoint))
        self._counts = devices.counts_of(home, self._mirror.connection, self._frontier_ms)
        self._last = judgements.transitions_of(self._mirror.connection, last=_LAST)
        if self._last and self.first_verdict_s is None:
            self.first_verdict_s = time.monotonic() - self.began

    def _behind(self) -> str:
        if self._frontier_ms is None:
            return "nothing judged yet: the first batch is running" if self._runs("lifecycle") else "nothing judged yet"
        behind_ms = wall_clock_ms() - self._frontier_ms
        return f"{format_duration(behind_ms // 1000 * 1000)} behind (judged up to {format_instant(self._frontier_ms)[11:19]})"

    def _runs(self, name: str) -> bool:
        return self.run.status(name).get("state") == "running"

    def _state(self) -> str:
        bridges, lifecycle = self._bridges(), self.run.status("lifecycle")
        parts = [f"{name} {bridge.get('state', 'starting')}" for name, bridge in bridges.items()]
        parts.append(f"lifecycle {lifecycle.get('state', 'starting')}")
        if airflow := self.run.status("airflow"):
            parts.append(f"airflow {airflow.get('state', 'starting')}")
        if publisher := self.run.status(PUBLISHER):
            parts.append(f"publisher {publisher.get('state', 'starting')}")
        jobs = (*bridges.values(), self.run.status("landing"), publisher)
        parts += dict.fromkeys(
            problem for status in jobs for problem in problems_of(status)
        )  # several bridges may report the same gap
        if failed := self.run.status(broker_log.STATUS).get("failed_logins"):
            parts.append(f"{failed} failed logins at the broker (fleet status)")
        if full := disk_full(self.run.home.path):
            parts.append(f"{full}: until then messages wait in the broker")
        if self._read_error:
            parts.append(self._read_error)
        return ", ".join(parts)

    def _bridges(self) -> dict[str, dict[str, Any]]:
        return {name: self.run.status(name) for name in map(bridge_job, self.run.home.bridges())}

    def _rate(self) -> float:
        return round(sum(bridge.get("rate_per_s", 0) for bridge in self._bridges().values()), 1)

    def line(self) -> str:
        """Return the figures in one line, for logs."""
        self._refresh()
        modes = ", ".join(f"{count} {mode}" for mode, count in self._counts["devices"].items()) or "no device yet"
        modes += f" ({self._counts['never_seen']} of the offline never seen)" if self._counts["never_seen"] else ""
        return (
            f"{modes}; {self._rate()} messages/s, {self._counts['messages']} landed; frontier {self._behind()}; {self._state()}"
        )

    def render(self) -> Group:
        """Return the screen."""
        self._refresh()
        modes = Text("  ")
        for mode, count in self._counts["devices"].items():
            modes.append(f"{mode} {count:,}   ", style=MODE_COLOURS.get(mode, "white"))
        if self._counts["never_seen"]:
            modes.append(f"({self._counts['never_seen']:,} of the offline never seen)", style="bright_black")
        if not self._counts["devices"]:
            modes.append("no verdicts yet: the first appear once the lifecycle job runs", style="bright_black")
        facts = Table.grid(padding=(0, 2))
        refused = sum(self._counts["quarantine"].values())
        others = {kind: count for kind, count in self._counts["judgements"].items() if kind != "transition"}
        facts.add_row("messages", f"{self._rate()} a second, {self._counts['messages']:,} landed, {refused:,} quarantined")
        facts.add_row("not judged", ", ".join(f"{count:,} {kind}" for kind, count in others.items()) or "none")
        facts.add_row("frontier", self._behind())
        facts.add_row("state", self._state())
        facts.add_row("broker", f"mqtt://{self.address.host}:{self.address.port}")
        if airflow := self.run.status("airflow"):
            facts.add_row("airflow", f"{airflow.get('url', '')} {airflow.get('state', '')}".strip())
        verdicts = as_table(self._last[::-1], TRANSITION_COLUMNS, "latest verdicts")
        title = f"fleetpulse  {self.run.home.path}"
        return Group(
            Panel(Group(modes, facts), title=title, title_align="left"),
            verdicts,
            Text("Ctrl-C stops everything", style="bright_black"),
        )

    def picture(self) -> str:
        """Return the current screen as SVG, such as the picture in the README."""
        recorded = Console(record=True, width=_PICTURE_COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        recorded.print(self.render())
        drawn = recorded.export_svg(title="./fleet up", unique_id="up")
        return re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL)  # a viewer must not fetch fonts from a third party
