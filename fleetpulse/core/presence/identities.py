"""Identity of a device: its id, or its site and id.

The setting ``identity`` chooses one when the home is created.

Rule: if the site is a part of the identity, landing and everything behind it use the id
``site/id``: bronze, state and reports. A gateway without a site is a device at the same site.
Topics do not change. `core.fold` reports conflicts: signals of one id from two sites in turn.

Source: ADR 35.
"""

import json
from dataclasses import replace
from enum import StrEnum

from fleetpulse.core.messages.decode import Rejection
from fleetpulse.core.rows import EVERYONE, FOR_EVERYONE, Kind, Row

SEPARATOR = "/"


class DeviceIdentity(StrEnum):
    """Fields of a message that identify its device (setting ``identity``)."""

    ID = "id"  # one id is one device, regardless of the site of its signals
    SITE_AND_ID = "site/id"  # one id at two sites is two devices


def identified(row: Row, identity: DeviceIdentity) -> Row | Rejection:
    """Return a decoded row with the device id that an installation uses.

    Args:
        row: decoded row; its device id is that of the topic.
        identity: setting of the installation.

    Returns:
        The row, or a rejection if it identifies no device: a row of a reserved kind about a device
        must name the site.
    """
    if identity is DeviceIdentity.ID or row.kind in FOR_EVERYONE:
        return row
    if row.site == EVERYONE:
        return Rejection(
            "topic",
            f'a topic must name the site: site and id identify a device here; got the id "{row.device_id}" without a site',
        )
    gateway = None if row.gateway is None else joined(row.site, row.gateway)
    body = _with_site(row.body, row.site) if row.kind is Kind.REGISTRY else row.body
    return replace(row, device_id=joined(row.site, row.device_id), gateway=gateway, body=body)


def joined(site: str, name: str) -> str:
    """Return the id of a device as ``site/id``; a name with a site is unchanged."""
    return name if SEPARATOR in name else f"{site}{SEPARATOR}{name}"


def _with_site(body: str | None, site: str) -> str | None:
    """Return the body of a registry row with the site added to its gateway."""
    content = json.loads(body or "{}")
    if not content.get("gateway"):
        return body
    return json.dumps({**content, "gateway": joined(site, content["gateway"])}, separators=(",", ":"), sort_keys=True)


def topic_of(device_id: str, kind: str, site: str = EVERYONE) -> str:
    """Return the topic of a row about a device.

    Args:
        device_id: id of the device as in bronze, including a site that is a part of the id.
        kind: kind of the row.
        site: site of the device; ignored if the id includes it.
    """
    return f"fleet/{device_id}/{kind}" if SEPARATOR in device_id else f"fleet/{site}/{device_id}/{kind}"


def device_of(topic: str, identity: DeviceIdentity) -> str | None:
    """Return the device id of a ``fleet/`` topic as in bronze; None if the topic names no device."""
    levels = topic.split(SEPARATOR)
    if len(levels) != 4:
        return None
    return joined(levels[1], levels[2]) if identity is DeviceIdentity.SITE_AND_ID else levels[2]
