"""Defaults of the embedded broker, which its settings and its program share."""

from typing import Final

SYNC: Final = "1s"  # interval at which the store is synced
CONNECTIONS: Final = 10_000
STORE_GIB: Final = 8  # messages that wait for the bridge
RETAINED: Final = 500_000  # retained messages
