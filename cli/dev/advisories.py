"""Known vulnerabilities of the locked packages, as pip-audit reports them.

Rule: an unreachable service is a skipped check with a reason, not a passed one. A service may also
answer that it does not know any package, as a mirror of an index without advisories does.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fleetpulse.paths import ROOT

PROBE: Final = "requirements/uv.txt"  # one package: shows within a second whether the service answers
LOCK: Final = "requirements/dev.txt"  # contains the other locks
_LIMIT_S: Final = 600
_PROBE_LIMIT_S: Final = 60


def check_advisories(root: Path = ROOT, program: Sequence[str] = ()) -> tuple[list[str], str]:
    """Look the locked packages up in PyPI's advisories.

    `[tool.fleet.advisories]` in pyproject.toml lists accepted ones: the id of an advisory and the reason.

    Args:
        root: root folder of the project.
        program: command of pip-audit; that of this environment by default.

    Returns:
        Faults, and a summary; the summary starts with "skipped" if the service does not answer.
    """
    program = program or (str(Path(sys.executable).parent / "pip-audit"),)
    probed, reason = _query(root, program, PROBE, _PROBE_LIMIT_S)
    if not any("skip_reason" not in one for one in probed or ()):
        return [], f"skipped: {reason or 'the advisory service does not know uv, so it has no data about other packages'}"
    found, reason = _query(root, program, LOCK, _LIMIT_S)
    if found is None:
        return [f"pip-audit cannot check {LOCK}: {reason}"], "failed"
    accepted: dict[str, str] = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["fleet"].get("advisories", {})
    faults: list[str] = []
    seen: set[str] = set()
    for package in [*found, *(probed or ())]:
        for one in package.get("vulns", ()):
            ids = {one["id"], *one.get("aliases", ())}
            seen |= ids
            if not ids & set(accepted):
                fixed = ", ".join(one["fix_versions"]) or "no version yet"
                faults.append(
                    f"{package['name']} {package['version']}: {one['id']}, fixed in {fixed}; run: ./fleet lock --upgrade"
                )
    faults += [
        f"pyproject.toml accepts {one}, which applies to no locked package; remove it" for one in accepted if one not in seen
    ]
    unknown = [one["name"] for one in found if "skip_reason" in one]
    summary = f"{len(found) - len(unknown)} packages checked"
    return faults, summary + (f"; unknown to the service: {', '.join(unknown)}" if unknown else "")


def _query(root: Path, program: Sequence[str], lock: str, limit_s: float) -> tuple[list[dict[str, Any]] | None, str]:
    """Return pip-audit's result for each package, or None and the reason of a failure."""
    cache = Path(os.environ.get("FLEET_CACHE") or root / ".cache") / "pip-audit"
    command = [*program, "--requirement", lock, "--require-hashes", "--disable-pip", "--format", "json"]
    command += ["--progress-spinner", "off", "--timeout", "15", "--cache-dir", str(cache)]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)[:300]
    try:
        return json.loads(done.stdout)["dependencies"], ""
    except (ValueError, KeyError):
        return None, (done.stderr.strip().splitlines() or [f"pip-audit ended with exit code {done.returncode}"])[-1][:300]
