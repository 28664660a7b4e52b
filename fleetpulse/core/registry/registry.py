"""The registry by its entries: what was said of a device, and the entry that says since an instant otherwise.

Rule 1: an entry acts from its instant until the next one; nothing that was said is taken away.
Rule 2: an entry says class and site as a whole: one that corrects the one leaves the other as it was then.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.policy import DEFAULT_CLASS, RULES
from fleetpulse.core.times import format_instant

ADD, DECOMMISSION = "add", "decommission"
LIMITS: Final = ("timeout_ms", "death_grace_ms")  # rules that a device may have of its own
AS_ITS_CLASS: Final = -1  # stands for a limit that is no longer the device's own


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the registry.

    Attributes:
        from_ms: the instant from which it acts, epoch milliseconds.
        op: add or decommission.
        site: its site; of a decommission it says nothing.
        device_class: its class; None: the default one.
        gateway: through whom it comes; None: as before.
        timeout_ms: its own timeout; None: that of its class.
        death_grace_ms: its own grace after a will; None: that of its class.
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
    """What was otherwise since an instant; None and False: as it was said.

    Attributes:
        from_ms: since when, epoch milliseconds.
        device_class: its class was this.
        site: it was here.
        gateway: it came through this one.
        timeout_ms: it had this timeout of its own; `AS_ITS_CLASS`: none.
        death_grace_ms: it had this grace of its own; likewise.
        registered: it was in service.
        decommissioned: it was out of service.
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
    """Return the timeout and the death grace that an entry gives its device, in milliseconds; None: those of its class.

    Args:
        content: of a registry row.

    Raises:
        ValueError: one lies outside of the bounds of the policy's.
    """
    for name in LIMITS:
        value = content.get(name)
        if value is not None and not RULES[name].fits(value):
            rule = f"a device's own {RULES[name].key} is whole milliseconds within the bounds of the policy's"
            raise ValueError(f"{rule}; got {value!r}"[:200])
    return content.get(LIMITS[0]), content.get(LIMITS[1])


def class_at(known: Sequence[Entry], instant_ms: int) -> str:
    """Return the class that a device has at an instant.

    Args:
        known: what the registry says of it, in order.
        instant_ms: epoch milliseconds.
    """
    added = [one for one in known if one.op == ADD and one.from_ms <= instant_ms]
    return (added[-1].device_class if added else None) or DEFAULT_CLASS


def corrected(known: Sequence[Entry], heard_at: str, wanted: Correction) -> Entry:
    """Return the entry that says what was otherwise.

    Args:
        known: what the registry says of the device, in order.
        heard_at: its site where the registry does not say it.
        wanted: what was otherwise.

    Raises:
        Misuse: nothing was otherwise, or what cannot be told by an entry.
        FleetError: it contradicts what the registry says of that instant.
    """
    _check(wanted)
    in_force = next((one for one in reversed(known) if one.from_ms <= wanted.from_ms), None)
    out_since = format_instant(in_force.from_ms) if in_force is not None and in_force.op == DECOMMISSION else None
    from_ms, taken = wanted.from_ms, {one.from_ms for one in known}
    while from_ms in taken:  # of two entries at one instant it is not said which acts last
        from_ms += 1
    if wanted.decommissioned:
        if out_since is not None:
            raise FleetError(
                f"it is out of service since {out_since}; name an earlier instant", code="correction-after-decommission"
            )
        return Entry(from_ms, DECOMMISSION, heard_at)
    if out_since is not None and not wanted.registered:
        raise FleetError(
            f"it is out of service since {out_since}, and an entry behind that would register it anew; "
            f"name an earlier instant, or say --registered if that is meant",
            code="correction-after-decommission",
        )
    added = [one for one in known if one.op == ADD]
    before = [one for one in added if one.from_ms <= wanted.from_ms]
    if added and not before and not wanted.registered:
        raise FleetError(
            f"the registry does not know it in service before {format_instant(added[0].from_ms)}; name that or a later instant, "
            f"or say --registered if it was in service: class and site are then those of its first registration unless named",
            code="correction-before-registration",
        )
    base = before[-1] if before else added[0] if added else Entry(from_ms, ADD, heard_at)
    return replace(
        base,
        from_ms=from_ms,
        site=wanted.site or base.site,
        device_class=wanted.device_class or base.device_class,
        gateway=wanted.gateway,
        timeout_ms=_corrected(base.timeout_ms, wanted.timeout_ms),
        death_grace_ms=_corrected(base.death_grace_ms, wanted.death_grace_ms),
    )


def _corrected(known: int | None, wanted: int | None) -> int | None:
    return known if wanted is None else None if wanted == AS_ITS_CLASS else wanted


def _check(wanted: Correction) -> None:
    of_it = (wanted.device_class, wanted.site, wanted.gateway)
    if "" in of_it:
        raise Misuse(
            "a class, a site and a gateway have a name; a gateway cannot be taken away, only another one named, "
            'and the default class is "default"',
            code="correction-name-missing",
        )
    given = any(of_it) or wanted.timeout_ms is not None or wanted.death_grace_ms is not None
    if wanted.decommissioned and (wanted.registered or given):
        raise Misuse(
            "a device out of service has no class, site, gateway or limit to correct: give --decommissioned alone",
            code="correction-of-decommissioned",
        )
    if not (wanted.decommissioned or wanted.registered or given):
        raise Misuse(
            "nothing is corrected; name at least one of --class, --site, --gateway, --timeout, --death-grace, --registered "
            "or --decommissioned. The id cannot be: a device with another id is another device",
            code="correction-empty",
        )
