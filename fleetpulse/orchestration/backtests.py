"""A backtest from a form: the policy is text, and the page that comes of it has a place of its own.

Rule: each run has a folder; what a person typed, and what came of it, lie side by side in it.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from fleetpulse.orchestration.operators import FleetOperator


class Backtest(FleetOperator):
    """Try the policy of the form on the history; the result is the figures, and where the page lies."""

    template_fields: ClassVar[Sequence[str]] = ("words", "policy", "run_name")

    def __init__(self, **kwargs: Any) -> None:
        words = ["backtest", "--from={{ params['from'] or '' }}", "--to={{ params.to or '' }}", "--json"]
        super().__init__(words=words, gives="json", **kwargs)
        self.policy = "{{ params.policy }}"
        self.run_name = "{{ run_id }}"

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Write the policy down, run the verb, and say where its page lies."""
        folder = folder_of(self.place.notes, self.run_name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "policy.toml").write_text(self.policy)
        page = folder / "report.html"
        self.words = [*self.words, f"--policy={folder / 'policy.toml'}", f"--html={page}"]
        return {"page": str(page), "figures": super().execute(context)}


def folder_of(notes: Path, run: str) -> Path:
    """Return the folder of a run; its name has no signs that a path or an address would take for its own."""
    return notes / "backtests" / re.sub(r"[^A-Za-z0-9_.-]", "-", run)
