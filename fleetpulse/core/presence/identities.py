"""What identifies a device: its id, or its site and its id, as an installation chose when it was made.

Rule: where the site is a part of the identity, a device's id is ``site/id`` from landing on: in bronze, state and reports.
A gateway that is named without a site is a device at the same site. Topics stay as they are.
"""

import json
from dataclasses import replace
from enum import StrEnum

from fleetpulse.core.messages.decode import Rejection
from fleetpulse.core.rows import EVERYONE, FOR_EVERYONE, Kind, Row

SEPARATOR = "/"


class DeviceIdentity(StrEnum):
    """Fields of a message that identify its device."""

    ID = "id"  # one id is one device, whichever site it speaks from
    SITE_AND_ID = "site/id"  # one id at two sites is two devices


def identified(row: Row, identity: DeviceIdentity) -> Row | Rejection:
    """Return a decoded row with the id that its device has in an installation.

    Args:
        row: as decoded: its id is that of the topic.
        identity: of the installation.

    Returns:
        The row, or why it names no device: a row of ours about a device names its site.
    """
    if identity is DeviceIdentity.ID or row.kind in FOR_EVERYONE:
        return row
    if row.site == EVERYONE:
        return Rejection("topic", f'devices are identified by site and id here; got the id "{row.device_id}" without a site')
    gateway = None if row.gateway is None else joined(row.site, row.gateway)
    body = _with_site(row.body, row.site) if row.kind is Kind.REGISTRY else row.body
    return replace(row, device_id=joined(row.site, row.device_id), gateway=gateway, body=body)


def joined(site: str, name: str) -> str:
    """Return the id of a device at a site, where the site is a part of it; a name that has a site keeps it."""
    return name if SEPARATOR in name else f"{site}{SEPARATOR}{name}"


def _with_site(body: str | None, site: str) -> str | None:
    """Return an entry of the registry with the site of its gateway."""
    content = json.loads(body or "{}")
    if not content.get("gateway"):
        return body
    return json.dumps({**content, "gateway": joined(site, content["gateway"])}, separators=(",", ":"), sort_keys=True)


def topic_of(device_id: str, kind: str, site: str = EVERYONE) -> str:
    """Return the topic of a row about a device.

    Args:
        device_id: as bronze has it: with its site where that is a part of it.
        kind: the kind of row.
        site: of a device whose id does not name it.
    """
    return f"fleet/{device_id}/{kind}" if SEPARATOR in device_id else f"fleet/{site}/{device_id}/{kind}"


def device_of(topic: str, identity: DeviceIdentity) -> str | None:
    """Return the id of the device that a topic below ``fleet/`` names, as bronze has it; None if it names none."""
    levels = topic.split(SEPARATOR)
    if len(levels) != 4:
        return None
    return joined(levels[1], levels[2]) if identity is DeviceIdentity.SITE_AND_ID else levels[2]
