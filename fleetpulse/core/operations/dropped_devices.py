"""Line of a plan with the number of devices that a change of the state drops.

A plan is a text for people. Airflow reads this one line of it, to ask a person before devices are
dropped.
"""

import re
from typing import Final

_LABEL: Final = "dropped devices"
_UNKNOWN: Final = "unknown, because the present state is not read"
_LINE: Final = re.compile(rf"^{_LABEL}: ([\d,]+|{_UNKNOWN})$", re.MULTILINE)


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
