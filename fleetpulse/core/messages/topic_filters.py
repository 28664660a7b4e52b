"""MQTT topic filters: whether one covers another, and whether two overlap.

A topic is a filter without wildcards. Source: MQTT 3.1.1, section 4.7.
"""


def covers(wide: str, narrow: str) -> bool:
    """Return whether an MQTT topic filter matches all topics that another one matches."""
    ours, theirs = wide.split("/"), narrow.split("/")
    for place, level in enumerate(ours):
        if level == "#":
            return place > 0 or not theirs[0].startswith("$")
        if place >= len(theirs) or theirs[place] == "#" or level not in ("+", theirs[place]):
            return False
        if place == 0 and level == "+" and theirs[0].startswith("$"):
            return False
    return len(ours) == len(theirs)


def overlap(one: str, other: str) -> bool:
    """Return whether a topic may match both of two MQTT topic filters."""
    left, right = one.split("/"), other.split("/")
    for a, b in zip(left, right, strict=False):
        if "#" in (a, b):
            return True
        if a != b and "+" not in (a, b):
            return False
    return len(left) == len(right) or "#" in (*left[len(right) :], *right[len(left) :])
