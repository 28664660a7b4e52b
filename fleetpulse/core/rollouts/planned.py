"""Line of a plan for people with the number of devices of a rollout; Airflow reads it to bind the start to its plan."""

import re
from typing import Final

from fleetpulse.core.errors import FleetError

_LINE: Final = re.compile(r"^devices: ([\d,]+) \(", re.MULTILINE)


def describe_devices(number: int, scope: str) -> str:
    """Return the line of a plan.

    Args:
        number: number of devices in the scope.
        scope: text of the filter, in one line.
    """
    return f"devices: {number:,} ({scope})"


def arguments_as_planned(plan: str) -> list[str]:
    """Return the options that bind a start to its plan: the largest number of devices.

    Raises:
        FleetError: the plan has no such line, or several ones.
    """
    found: list[str] = _LINE.findall(plan)
    if len(found) != 1:
        raise FleetError(
            f"the plan of the rollout is unclear: it has {len(found)} lines with a number of devices; expected 1; start it by "
            f"the command ./fleet rollout start",
            code="plan-unclear",
        )
    return [f"--devices-at-most={found[0].replace(',', '')}"]
