"""fleetpulse: judges the lifecycle of a fleet of devices from their messages."""

__version__ = "0.1.0"
