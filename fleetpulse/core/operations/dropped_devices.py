"""Lines of a plan with the snapshot, and with the number of devices that a change of the state drops.

A plan is a text for people. Airflow reads these two lines of it: to ask a person before devices are
dropped, and to run the change as planned.
"""

import re
from typing import Final

from fleetpulse.core.errors import FleetError

_LABEL: Final = "dropped devices"
_UNKNOWN: Final = "unknown, because the present state is not read"
_LINE: Final = re.compile(rf"^{_LABEL}: ([\d,]+|{_UNKNOWN})$", re.MULTILINE)
_SNAPSHOT: Final = re.compile(r"^snapshot version (\d+) of generation ", re.MULTILINE)


def describe_dropped(number: int | None) -> str:
    """Return the line of a plan; None is an unknown number."""
    return f"{_LABEL}: {_UNKNOWN if number is None else f'{number:,}'}"


def parse_dropped(plan: str) -> int | None:
    """Return the number of dropped devices in a plan.

    It is None if the plan has no such line, or if a line has an unknown number. Of several lines,
    the largest number counts.
    """
    found: list[str] = _LINE.findall(plan)
    if not found or _UNKNOWN in found:
        return None
    return max(int(number.replace(",", "")) for number in found)


def arguments_as_planned(plan: str) -> list[str]:
    """Return the options that bind a bootstrap to its plan: the snapshot, and the largest number of dropped devices.

    Raises:
        FleetError: the plan names no snapshot, several ones, or an unknown number of dropped devices.
    """
    snapshots, dropped = set(_SNAPSHOT.findall(plan)), parse_dropped(plan)
    if len(snapshots) != 1 or dropped is None:
        raise FleetError(
            f"the plan of the bootstrap is unclear: it names {len(snapshots)} snapshots; expected 1, and a number of "
            f"dropped devices; bootstrap by the command ./fleet state bootstrap",
            code="plan-unclear",
        )
    return [f"--version={snapshots.pop()}", f"--drops-at-most={dropped}"]


def require_dropped_at_most(dropped: int | None, limit: int) -> None:
    """Refuse a bootstrap that drops more devices than a limit.

    Args:
        dropped: number of dropped devices; None if it is unknown.
        limit: the largest permitted number.

    Raises:
        FleetError: it drops more, or an unknown number.
    """
    if dropped is None or dropped > limit:
        raise FleetError(
            f"the bootstrap would drop {'an unknown number of' if dropped is None else f'{dropped:,}'} devices, so nothing was "
            f"changed; expected at most {limit:,} (--drops-at-most); read the plan again: --dry-run",
            code="bootstrap-drops-more",
        )
