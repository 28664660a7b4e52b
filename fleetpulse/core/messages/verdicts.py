"""Messages that publish verdicts: retained states, and Home Assistant's MQTT discovery.

Rule 1: a device id becomes a topic level or an object id by an escape that can be undone, so two
devices never share a topic.
Rule 2: no value from a device is part of a template: Home Assistant runs templates.
Rule 3: a device out of service has no retained message: an empty payload removes it at the broker.

Source: https://www.home-assistant.io/integrations/mqtt/#device-discovery-payload
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from fleetpulse.core.lifecycle import OUT_OF_SERVICE, PRESENT, Mode
from fleetpulse.core.times import format_instant

STATES: Final = "fleetpulse/state"  # prefix of the topics of devices' states
STATUS: Final = "fleetpulse/status"  # ``ONLINE`` or ``OFFLINE``: whether the publisher runs
MARKER: Final = "fleetpulse/published"  # position of the publisher, see `streaming.publisher`
ONLINE: Final = b"online"  # the payloads that Home Assistant expects by default
OFFLINE: Final = b"offline"
DISCOVERY_PREFIX: Final = "homeassistant"  # default of Home Assistant
PUBLISHED: Final = (f"{STATES}/#", STATUS, f"{DISCOVERY_PREFIX}/#")  # topic filters for readers of verdicts
_SAFE: Final = "/:@"  # kept in a topic, beside letters, digits and _ . - ~
_ESCAPED: Final = re.compile(rb"[^A-Za-z0-9-]")
_CONNECTED: Final = ", ".join(f"'{mode.value}'" for mode in sorted(PRESENT))


@dataclass(frozen=True, slots=True)
class PresentMode:
    """Present mode of a device.

    Attributes:
        device_id: id of the device.
        mode: its mode; None if it has none any more, since its transitions were retracted.
        since_ms: instant since which it has the mode, epoch milliseconds.
        last_seen_ms: presence time of its last signal when the mode changed; None if never heard.
        trigger: cause of the newest transition.
        appears: whether the device may be unknown to readers, so its discovery is published, too.
    """

    device_id: str
    mode: Mode | None = None
    since_ms: int | None = None
    last_seen_ms: int | None = None
    trigger: str | None = None
    appears: bool = True


def state_topic(device_id: str) -> str:
    """Return the topic of a device's state; all but ASCII letters, digits and ``_.-~/:@`` is percent-encoded."""
    return f"{STATES}/{quote(device_id, safe=_SAFE)}"


def object_id(device_id: str) -> str:
    """Return a device id in the characters that discovery allows: letters, digits, ``_`` and ``-``.

    ``_`` becomes ``__``, and each other byte of UTF-8 ``_`` with two upper-case hexadecimal digits.
    """
    escaped = _ESCAPED.sub(lambda found: b"__" if found[0] == b"_" else b"_%02X" % found[0][0], device_id.encode())
    return f"fleetpulse_{escaped.decode()}"


def discovery_topic(prefix: str, device_id: str) -> str:
    """Return the topic of a device's discovery message."""
    return f"{prefix}/device/{object_id(device_id)}/config"


def messages(present: PresentMode, prefix: str) -> Iterator[tuple[str, bytes]]:
    """Yield topic and payload of the retained messages about a device, in publishing order.

    A payload is empty if the message must be removed. Home Assistant then removes the device before
    its state.

    Args:
        present: present mode of the device.
        prefix: prefix of discovery topics; empty for no discovery.
    """
    gone = present.mode is None or present.mode in OUT_OF_SERVICE
    state = state_topic(present.device_id), b"" if gone else _state(present)
    if not prefix or not (gone or present.appears):
        yield state
        return
    config = discovery_topic(prefix, present.device_id), b"" if gone else _discovery(present.device_id)
    yield from (config, state) if gone else (state, config)


def _state(present: PresentMode) -> bytes:
    return _json(
        {
            "device_id": present.device_id,
            "mode": present.mode,
            "since": None if present.since_ms is None else format_instant(present.since_ms),
            "last_seen": None if present.last_seen_ms is None else format_instant(present.last_seen_ms),
            "trigger": present.trigger,
        }
    )


def _discovery(device_id: str) -> bytes:
    """Return a device discovery payload: a sensor of the mode, and one of the connection.

    The connection is unknown in modes in which silence is expected, or hidden by a dead gateway.
    """
    topic, own_id = state_topic(device_id), object_id(device_id)
    connection = f"{{{{ 'ON' if value_json.mode in [{_CONNECTED}] else 'OFF' if value_json.mode == 'offline' else None }}}}"
    return _json(
        {
            "device": {"identifiers": [own_id], "name": device_id},
            "origin": {"name": "fleetpulse"},
            "availability_topic": STATUS,
            "state_topic": topic,
            "qos": 1,
            "components": {
                "mode": {
                    "platform": "sensor",
                    "unique_id": f"{own_id}_mode",  # unique: no escape begins with _ and a lower-case letter
                    "name": "Mode",
                    "device_class": "enum",
                    "options": [mode.value for mode in Mode if mode not in OUT_OF_SERVICE],
                    "value_template": "{{ value_json.mode }}",
                    "json_attributes_topic": topic,
                },
                "connection": {
                    "platform": "binary_sensor",
                    "unique_id": f"{own_id}_connection",
                    "name": "Connection",
                    "device_class": "connectivity",
                    "value_template": connection,
                },
            },
        }
    )


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def prefix_fault(prefix: str) -> str | None:
    """Return why discovery cannot use a prefix; None if it can, or if it is empty."""
    if not prefix:
        return None
    levels = prefix.split("/")
    if not prefix.isascii() or not prefix.isprintable() or any(not level or set(level) & set(" +#$*>%") for level in levels):
        return f"a discovery prefix has printable ASCII levels without spaces and + # $ * > %; got {prefix!a}"
    if levels[0] in ("fleet", "fleetpulse"):
        return f'a discovery prefix must not be below "fleet" or "fleetpulse", which are for other messages; got "{prefix}"'
    return None
