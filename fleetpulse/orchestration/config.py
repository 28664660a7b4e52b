"""Where the operations act and where they tell of failures: read from the environment once, here and nowhere else.

Rule: a DAG names no path and no address; what differs between installations is in `PLACE`.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetpulse.paths import ROOT


@dataclass(frozen=True, slots=True)
class OrchestrationConfig:
    """One installation.

    Attributes:
        command: the program ``fleet``.
        home: the folder that keeps everything of it.
        webhook: where failures are posted, as JSON; None where nobody asked for it.
        bootstrap_schedule: a cron line by which the state is begun anew from the newest snapshot; None: only when asked.
    """

    command: str
    home: Path
    webhook: str | None = None
    bootstrap_schedule: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "OrchestrationConfig":
        """Read it from an environment: FLEET_HOME, FLEET_COMMAND, FLEET_WEBHOOK (or _FILE), FLEET_BOOTSTRAP_SCHEDULE."""
        return cls(
            environment.get("FLEET_COMMAND") or str(ROOT / "fleet"),
            Path(environment.get("FLEET_HOME") or ROOT / ".fleet").absolute(),
            environment.get("FLEET_WEBHOOK") or _secret(environment.get("FLEET_WEBHOOK_FILE")),
            environment.get("FLEET_BOOTSTRAP_SCHEDULE") or None,
        )

    @property
    def notes(self) -> Path:
        """The folder of what the operations themselves remember: positions of watchers, failures told, reports."""
        return self.home / "airflow" / "fleet"

    def line(self, words: list[str]) -> list[str]:
        """Return the command line of a verb, as a person types it."""
        return [self.command, *words, "--home", str(self.home)]


def _secret(path: str | None) -> str | None:
    try:
        return Path(path).read_text().strip() or None if path else None
    except OSError:
        return None  # a failure that cannot be told that way is still red


PLACE: Final = OrchestrationConfig.of(os.environ)


def folder_of(notes: Path, run: str) -> Path:
    """Return the folder of a run; its name has no signs that a path or an address would take for its own."""
    return notes / "backtests" / re.sub(r"[^A-Za-z0-9_.-]", "-", run)
