"""The kinds of kill: what is known of them before one is done."""

from enum import StrEnum
from typing import Final


class Victim(StrEnum):
    """The kinds of kill."""

    BRIDGE = "bridge"
    BROKER = "broker"  # started again at once
    LANDING = "landing"
    LIFECYCLE = "lifecycle"  # the job itself, or its JVM
    OUTAGE = "outage"  # the broker, away for longer than the timeout


OF_JOBS: Final = (Victim.BRIDGE, Victim.LANDING, Victim.LIFECYCLE)
