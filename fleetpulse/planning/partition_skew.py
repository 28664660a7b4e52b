"""Skew of key groups over state partitions, by Spark's hash partitioning.

Source: Spark's ``hash`` of an integer (32-bit Murmur3, seed 42), modulo the number of partitions.
"""

from collections import Counter
from typing import Final

_SEED: Final = 42
_WORD: Final = 0xFFFFFFFF


def partition_of(key_group: int, partitions: int) -> int:
    """Return the number of the partition that holds a key group, from 0.

    Args:
        key_group: number of the key group, from 0.
        partitions: number of partitions.
    """
    mixed = _turned(key_group * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD
    value = (_turned(_SEED ^ mixed, 13) * 5 + 0xE6546B64 & _WORD) ^ 4
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = (value ^ value >> shift) * factor & _WORD
    return (value - (value >> 31 << 32)) % partitions


def busiest(key_groups: int, partitions: int) -> float:
    """Return the load of the busiest partition relative to the mean: 1.0 if balanced."""
    held = Counter(partition_of(group, partitions) for group in range(key_groups))
    return max(held.values()) * partitions / key_groups


def most_even(least: int, most: int, partitions: int) -> int:
    """Return the number of key groups that Spark distributes most evenly; the least among equals.

    Args:
        least: least number of key groups.
        most: greatest number of key groups.
        partitions: number of partitions.
    """
    held, fullest, found = [0] * partitions, 0, (float("inf"), least)
    for groups in range(1, most + 1):
        partition = partition_of(groups - 1, partitions)
        held[partition] += 1
        fullest = max(fullest, held[partition])
        if groups >= least:
            found = min(found, (round(fullest * partitions / groups, 1), groups))
    return found[1]


def _turned(value: int, bits: int) -> int:
    return (value << bits | value >> 32 - bits) & _WORD
