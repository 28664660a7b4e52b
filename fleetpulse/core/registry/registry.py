"""Registry entries of a device, and the entry that corrects them since an instant.

Rule 1: an entry is in force from its instant until the next entry; entries are never removed.
Rule 2: an entry sets class and site together. An entry that corrects one of them repeats the other
as it was at that instant.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.policy import DEFAULT_CLASS, RULES
from fleetpulse.core.times import format_instant

ADD, DECOMMISSION = "add", "decommission"
LIMITS: Final = ("timeout_ms", "death_grace_ms")  # rules that the registry can set for a single device
AS_ITS_CLASS: Final = -1  # value of a limit that resets it to that of the class


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the registry.

    Attributes:
        from_ms: instant from which the entry is in force, epoch milliseconds.
        op: add or decommission.
        site: site of the device; without meaning if ``op`` is decommission.
        device_class: class of the device; None: the default class.
        gateway: gateway of the device; None: unchanged.
        timeout_ms: timeout of this device, milliseconds; None: that of its class.
        death_grace_ms: grace period of this device, milliseconds; None: that of its class.
    """

    from_ms: int
    op: str
    site: str
    device_class: str | None = None
    gateway: str | None = None
    timeout_ms: int | None = None
    death_grace_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Correction:
    """Correction of the registry since an instant; None and False: unchanged.

    Attributes:
        from_ms: instant from which the correction holds, epoch milliseconds.
        device_class: correct class.
        site: correct site.
        gateway: correct gateway.
        timeout_ms: correct timeout of this device, milliseconds; `AS_ITS_CLASS`: that of its class.
        death_grace_ms: correct grace period of this device, milliseconds; `AS_ITS_CLASS`: that of
            its class.
        registered: whether the device was in service.
        decommissioned: whether the device was out of service.
    """

    from_ms: int
    device_class: str | None = None
    site: str | None = None
    gateway: str | None = None
    timeout_ms: int | None = None
    death_grace_ms: int | None = None
    registered: bool = False
    decommissioned: bool = False


def limits(content: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the timeout and grace period that an entry sets, milliseconds.

    None: that of the class.

    Args:
        content: body of a registry row.

    Raises:
        ValueError: a limit outside the bounds that a policy has for it.
    """
    for name in LIMITS:
        value = content.get(name)
        if value is not None and not RULES[name].fits(value):
            rule = f"{RULES[name].key} of a device must be whole milliseconds within the bounds of the policy rule"
            raise ValueError(f"{rule}; got {value!r}"[:200])
    return content.get(LIMITS[0]), content.get(LIMITS[1])


def class_at(known: Sequence[Entry], instant_ms: int) -> str:
    """Return the class of a device at an instant.

    Args:
        known: entries of the device, in order.
        instant_ms: epoch milliseconds.
    """
    added = [one for one in known if one.op == ADD and one.from_ms <= instant_ms]
    return (added[-1].device_class if added else None) or DEFAULT_CLASS


def corrected(known: Sequence[Entry], heard_at: str, correction: Correction) -> Entry:
    """Return the entry that makes a correction.

    Args:
        known: entries of the device, in order.
        heard_at: site of the device if the registry has no entry for it.
        correction: correction to make.

    Raises:
        Misuse: an empty correction, or one that an entry cannot express.
        FleetError: a correction that contradicts the registry at that instant.
    """
    _check(correction)
    in_force = next((one for one in reversed(known) if one.from_ms <= correction.from_ms), None)
    out_since = format_instant(in_force.from_ms) if in_force is not None and in_force.op == DECOMMISSION else None
    from_ms, used_instants = correction.from_ms, {one.from_ms for one in known}
    while from_ms in used_instants:  # two entries at one instant would have no order
        from_ms += 1
    if correction.decommissioned:
        if out_since is not None:
            raise FleetError(
                f"the device is already out of service since {out_since}; name an earlier instant",
                code="correction-after-decommission",
            )
        return Entry(from_ms, DECOMMISSION, heard_at)
    if out_since is not None and not correction.registered:
        raise FleetError(
            f"the device is out of service since {out_since}, and a later entry would register it again; "
            f"name an earlier instant, or add --registered to register it",
            code="correction-after-decommission",
        )
    added = [one for one in known if one.op == ADD]
    before = [one for one in added if one.from_ms <= correction.from_ms]
    if added and not before and not correction.registered:
        raise FleetError(
            f"the device is in service only since {format_instant(added[0].from_ms)}, by the registry; name that or a later "
            f"instant, or add --registered if it was in service (class and site are then those of its first entry, unless named)",
            code="correction-before-registration",
        )
    base = before[-1] if before else added[0] if added else Entry(from_ms, ADD, heard_at)
    return replace(
        base,
        from_ms=from_ms,
        site=correction.site or base.site,
        device_class=correction.device_class or base.device_class,
        gateway=correction.gateway,
        timeout_ms=_corrected(base.timeout_ms, correction.timeout_ms),
        death_grace_ms=_corrected(base.death_grace_ms, correction.death_grace_ms),
    )


def _corrected(base_ms: int | None, correction_ms: int | None) -> int | None:
    return base_ms if correction_ms is None else None if correction_ms == AS_ITS_CLASS else correction_ms


def _check(correction: Correction) -> None:
    names = (correction.device_class, correction.site, correction.gateway)
    if "" in names:
        raise Misuse(
            "a class, a site and a gateway must have a name; got an empty one; name another gateway to replace one (it cannot be "
            'removed), and name the default class "default"',
            code="correction-name-missing",
        )
    has_values = any(names) or correction.timeout_ms is not None or correction.death_grace_ms is not None
    if correction.decommissioned and (correction.registered or has_values):
        raise Misuse(
            "a device out of service has no class, site, gateway or limit to correct; use --decommissioned alone",
            code="correction-of-decommissioned",
        )
    if not (correction.decommissioned or correction.registered or has_values):
        raise Misuse(
            "the correction is empty; use at least one of --class, --site, --gateway, --timeout, --death-grace, --registered "
            "or --decommissioned. The id cannot be corrected: a device with another id is another device",
            code="correction-empty",
        )
