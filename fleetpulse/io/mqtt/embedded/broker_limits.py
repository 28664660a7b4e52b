"""Limits of the embedded broker: connections, log files, and the store.

Rule 1: a full store must not lock out the bridge, which empties it. NATS refuses every session when the
store reaches the server's limit ``max_file``. That limit is therefore too high to be reached, and the
streams of messages have smaller limits. If a stream is full, the broker closes the connection of a publisher
without an acknowledgement, and the device sends its message again later.

Rule 2: devices must not cut the bridge off. NATS closes a connection to which more than `PENDING_BYTES` wait
to be sent. With the default of NATS, 64 MB, one device that sent messages of 1 MB faster than the bridge
read them caused five disconnections of the bridge in 30 s. A new subscription gets all matching retained
messages at once, so the total size of retained messages is limited to less, `RETAINED_BYTES`.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.operations import broker_defaults
from fleetpulse.io.mqtt.acl import quoted
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.embedded.broker_api import broker_api
from fleetpulse.io.mqtt.embedded.retained_cleanup import STREAM as RETAINED

MAX_SUBSCRIPTIONS: Final = 1_000  # of a connection: each filter of a persistent session keeps a file of its own
PENDING_BYTES: Final = 512 * 1_024**2  # of a connection; memory is allocated only for bytes that wait
RETAINED_BYTES: Final = PENDING_BYTES * 3 // 4
LOG_BYTES: Final = 10_000_000
LOG_FILES: Final = 5  # including the current one
_PARTS: Final = {"$MQTT_msgs": 1.0, RETAINED: 0.25}  # messages, and retained ones
SERVER_BYTES: Final = 1_024**4  # NATS refuses a limit of a stream if all of them together exceed that of the server


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """Limits of the embedded broker.

    Attributes:
        connections: maximum number of connections.
        store_bytes: maximum size of the messages that wait for the bridge.
        retained: maximum number of retained messages; the server keeps their topics in its memory.
        log_bytes: size at which a log file is rotated.
        log_files: number of log files that are kept.
    """

    connections: int = broker_defaults.CONNECTIONS
    store_bytes: int = broker_defaults.STORE_GIB * 1_024**3
    retained: int = broker_defaults.RETAINED
    log_bytes: int = LOG_BYTES
    log_files: int = LOG_FILES

    def on_disk(self, folder: Path) -> "BrokerLimits":
        """Return the limits with a store of at most half the disk space that it uses or that is free.

        Args:
            folder: folder of the broker.
        """
        used = sum(path.stat().st_size for path in (folder / "store").rglob("*") if path.is_file())
        room = used + shutil.disk_usage(folder).free
        return replace(self, store_bytes=min(self.store_bytes, room // 2))

    def configuration(self, folder: Path, log: Path) -> str:
        """Return the lines of nats.conf for the limits.

        Args:
            folder: folder of the broker; `limit_streams` finds the local port there.
            log: path of the log file. Its rotated files have the time as a suffix.
        """
        return f"""max_connections: {self.connections + 1}  # one is that of `ConnectionCleaner`
max_subscriptions: {MAX_SUBSCRIPTIONS}
max_pending: {PENDING_BYTES}
log_file: {quoted(str(log))}
logfile_size_limit: {self.log_bytes}
logfile_max_num: {self.log_files}
ports_file_dir: {quoted(str(folder))}
"""


def limit_streams(folder: Path, pid: int, address: BrokerAddress, limits: BrokerLimits) -> None:
    """Limit the streams in which a running broker keeps messages.

    Call it after the first MQTT client has connected: NATS creates the streams for it.

    Args:
        folder: folder of the broker.
        pid: process id of the server.
        address: address with the broker's own user and password.
        limits: limits of the broker.

    Raises:
        FleetError: the server refused a limit, or did not answer.
    """
    try:
        with broker_api(folder, pid, address) as ask:
            for stream, part in _PARTS.items():
                known = ask(f"$JS.API.STREAM.INFO.{stream}", {})
                if error := known.get("error"):
                    if error.get("code") == 404:
                        continue
                    raise ValueError(f"{stream}: {error['description']}")
                wanted = {**known["config"], "max_bytes": int(part * limits.store_bytes), "discard": "new"}  # deletes nothing
                if stream == RETAINED:
                    wanted |= {"max_bytes": min(wanted["max_bytes"], RETAINED_BYTES), "max_msgs": limits.retained}
                if error := ask(f"$JS.API.STREAM.UPDATE.{stream}", wanted).get("error"):
                    raise ValueError(f"{stream}: {error['description']}")
    except (OSError, ValueError, KeyError) as error:
        raise FleetError(
            f"the broker did not accept the limit of its store ({error}); see its log, and start again",
            code="broker-limit-refused",
        ) from None


def remove_ports(folder: Path) -> None:
    """Remove the port files of killed servers before a start, since process ids are reused."""
    for path in folder.glob("nats-server_*.ports"):
        path.unlink()
