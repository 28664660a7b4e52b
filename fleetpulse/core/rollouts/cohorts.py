"""Cohort of a device, and the ids of its commands: functions of the rollout's name and the device id.

Rule: neither depends on the other devices, on time or on a stored draw. A repeated step has the same cohorts and the same
command ids.

Source: ADR 49.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

_BITS: Final = 64


def cohort_of(rollout: str, device_id: str, cohorts: Sequence[int]) -> int:
    """Return the number of a device's cohort, from 1.

    Args:
        rollout: name of the rollout. Another rollout begins with other devices.
        device_id: id of the device.
        cohorts: shares, see `RolloutPlan.cohorts`.
    """
    place = int.from_bytes(_digest(rollout, device_id), "big") * 100
    return next(number for number, share in enumerate(cohorts, 1) if place < share << _BITS)


def cohort_sizes(rollout: str, device_ids: Iterable[str], cohorts: Sequence[int]) -> list[int]:
    """Return the number of devices in each cohort."""
    sizes = [0] * len(cohorts)
    for device_id in device_ids:
        sizes[cohort_of(rollout, device_id, cohorts) - 1] += 1
    return sizes


def command_id(rollout: str, cohort: int, device_id: str) -> str:
    """Return the id of the command that a device of a cohort gets."""
    return _digest("command", rollout, str(cohort), device_id, size=12).hex()


def _digest(*parts: str, size: int = _BITS // 8) -> bytes:
    return blake2b("\n".join(parts).encode(), digest_size=size).digest()
