"""Names of the streams beside the lifecycle, which settings, checkpoints and tables use."""

from enum import StrEnum


class StreamName(StrEnum):
    """One stream beside the lifecycle; its value names its setting, its checkpoint and its table."""

    SESSIONS = "sessions"  # connections of devices, from birth to will, disconnect, next birth or silence
    VITALS = "vitals"  # metrics of devices over windows of event time
    COMMANDS = "commands"  # commands to devices, joined with their answers
