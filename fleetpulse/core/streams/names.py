"""Names of the streams beside the lifecycle, which settings, checkpoints and tables use."""

from enum import StrEnum

from fleetpulse.core.errors import FleetError


class StreamName(StrEnum):
    """One stream beside the lifecycle; its value names its setting, its checkpoint and its table."""

    SESSIONS = "sessions"  # connections of devices, from birth to will, disconnect, next birth or silence
    VITALS = "vitals"  # metrics of devices over windows of event time
    COMMANDS = "commands"  # commands to devices, joined with their answers


class StreamRestart(FleetError):
    """A batch needs another query, such as one with a newer policy; the stream starts again at once."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, code="stream-restart")
