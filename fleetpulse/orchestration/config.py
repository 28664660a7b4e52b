"""Configuration of the DAGs: paths and addresses, read from the environment.

Rule: a DAG contains no path and no address. `CONFIG` holds all settings that differ between
installations; only this module reads the environment.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from fleetpulse.paths import ROOT, home_folder

_LONGEST_NAME: Final = 200  # of a folder without its suffix; a file system allows 255 bytes


@dataclass(frozen=True, slots=True)
class OrchestrationConfig:
    """Configuration of one installation.

    Attributes:
        command: path of the program ``fleet``.
        home: home folder of the installation.
        webhook: URL to which failures are posted as JSON; None to post none.
        bootstrap_schedule: cron line of the runs that bootstrap the state from the newest snapshot;
            None for runs by hand only.
        approvers: names of the users who may approve a change of the state; empty for all who may
            answer in Airflow.
        self_approval: whether the user who triggered a run may approve it, if the users are those
            of Airflow's simple auth manager.
    """

    command: str
    home: Path
    webhook: str | None = None
    bootstrap_schedule: str | None = None
    approvers: tuple[str, ...] = ()
    self_approval: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "OrchestrationConfig":
        """Read the configuration from environment variables.

        These are FLEET_HOME, FLEET_COMMAND, FLEET_WEBHOOK (or FLEET_WEBHOOK_FILE),
        FLEET_BOOTSTRAP_SCHEDULE, FLEET_APPROVERS and FLEET_SELF_APPROVAL. They are no variables of
        Airflow, which its users can change.

        Raises:
            FleetError: FLEET_HOME is an address, not a path.
        """
        return cls(
            environment.get("FLEET_COMMAND") or str(ROOT / "fleet"),
            home_folder(Path(environment.get("FLEET_HOME") or ROOT / ".fleet")).absolute(),
            environment.get("FLEET_WEBHOOK") or _secret(environment.get("FLEET_WEBHOOK_FILE")),
            environment.get("FLEET_BOOTSTRAP_SCHEDULE") or None,
            tuple(name.strip() for name in environment.get("FLEET_APPROVERS", "").split(",") if name.strip()),
            environment.get("FLEET_SELF_APPROVAL") == "yes",
        )

    @property
    def data_folder(self) -> Path:
        """Folder for data of the DAGs: watcher positions, sent notifications, reports."""
        return self.home / "airflow" / "fleet"

    @property
    def pages_key(self) -> Path:
        """Key file of page addresses; without it, all addresses issued before are invalid."""
        return self.data_folder / "pages.key"

    def command_line(self, arguments: list[str]) -> list[str]:
        """Return the command line of a verb, as you would type it."""
        return [self.command, *arguments, "--home", str(self.home)]


def _secret(path: str | None) -> str | None:
    try:
        return Path(path).read_text().strip() or None if path else None
    except OSError:
        return None  # without the webhook, Airflow still shows the failed run


CONFIG: Final = OrchestrationConfig.of(os.environ)


def backtest_folder(notes: Path, run: str) -> Path:
    """Return the folder of a backtest run.

    Its name is the run id, reduced to characters that are safe in paths and URLs, and a digest. A user
    chooses the id: without the digest, ``..`` would be another folder, and two ids could have one folder.
    """
    return notes / "backtests" / _folder_name(run)


def rollout_folder(notes: Path, run: str) -> Path:
    """Return the folder of a rollout's run, which has its plan; see `backtest_folder` for its name."""
    return notes / "rollouts" / _folder_name(run)


def _folder_name(run: str) -> str:
    digest = sha256(run.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', run)[:_LONGEST_NAME]}-{digest}"
