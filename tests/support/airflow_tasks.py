"""Context and configuration of a task, for calls of an operator's ``execute``."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fleetpulse.paths import ROOT


class Context(dict[str, Any]):
    """Minimal context of a task in its first try, which collects XCom values in ``left``."""

    max_tries = 0
    task = SimpleNamespace(retries=0)

    def __init__(self) -> None:
        super().__init__(ti=self)
        self.left: dict[str, Any] = {}

    def xcom_push(self, key: str, value: Any) -> None:
        self.left[key] = value


def place(home: Path, command: str | None = None, **settings: Any) -> Any:
    from fleetpulse.orchestration.config import OrchestrationConfig

    return OrchestrationConfig(command or str(ROOT / "fleet"), home, **settings)


def batch(home: Path, number: int, watermark_ms: int = 5_000) -> None:
    at = home / "checkpoints" / "lifecycle" / "gen-0001"
    for folder in ("commits", "offsets"):
        (at / folder).mkdir(parents=True, exist_ok=True)
    (at / "offsets" / str(number)).write_text('v1\n{"batchWatermarkMs": 0}\n{}')
    (at / "commits" / str(number)).write_text(f"v1\n{json.dumps({'nextBatchWatermarkMs': watermark_ms})}")
