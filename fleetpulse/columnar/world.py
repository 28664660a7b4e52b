"""Coverage and policies as arrays: what the compiled fold asks of the world at an instant.

Rule: it holds what `Coverage` and `Policies` hold, and answers the same; the laws in ``tests/property`` compare them.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from fleetpulse.core.coverage import Coverage
from fleetpulse.core.machine import HELD, PRESENT, TRANSITIONS, Mode, Trigger
from fleetpulse.core.policy import MAX_SEQUENCE, Policies, Rules

Int64s = NDArray[np.int64]
NONE: Final = np.iinfo(np.int64).min  # stands for no instant
NEVER: Final = np.iinfo(np.int64).max
MODES: Final = tuple(Mode)
TRIGGERS: Final = tuple(Trigger)

RULES: Final = ("timeout_ms", "death_grace_ms", "forget_after_ms", "degraded_errors", "degraded_window_ms", "flagged_window_ms",
                "flagged_hold_ms", "last_errors")  # fmt: skip
TIMEOUT, DEATH_GRACE, FORGET_AFTER, DEGRADED_ERRORS, DEGRADED_WINDOW, FLAGGED_WINDOW, FLAGGED_HOLD, LAST_ERRORS = range(8)


class World(NamedTuple):
    """What a device is judged by, as arrays.

    Attributes:
        start_ms: the instant before which nothing is covered.
        base_ms: covered time then.
        opened: first instant of each gap.
        closed: end of each gap; `NEVER` where it is still open.
        effective_ms: from when each policy is in effect, ascending.
        rules: policy x class x `RULES`.
        steps: policy x class x `MAX_SEQUENCE`: the flagged sequence as error codes; -1 behind its end.
        sequence: policy x class: number of that sequence.
        quarantines: for each policy whether it lists unknown devices instead of judging them.
        following: mode x trigger: the mode that the transition table gives; -1 where a trigger has no effect.
        present: for each mode whether a device is heard from in time.
        held: for each mode whether silence is expected.
    """

    start_ms: int
    base_ms: int
    opened: Int64s
    closed: Int64s
    effective_ms: Int64s
    rules: NDArray[np.int64]
    steps: NDArray[np.int32]
    sequence: NDArray[np.int32]
    quarantines: NDArray[np.bool_]
    following: NDArray[np.int8]
    present: NDArray[np.bool_]
    held: NDArray[np.bool_]


def _following() -> NDArray[np.int8]:
    table = np.full((len(MODES), len(TRIGGERS)), -1, np.int8)
    for (mode, trigger), target in TRANSITIONS.items():
        table[MODES.index(mode), TRIGGERS.index(trigger)] = MODES.index(target)
    return table


_FOLLOWING: Final = _following()
_PRESENT: Final = np.array([mode in PRESENT for mode in MODES])
_HELD: Final = np.array([mode in HELD for mode in MODES])


class Vocabulary:
    """Numbers for words, in the order in which they were first met."""

    def __init__(self, words: Sequence[Any] = ()) -> None:
        self.words = list(words)
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def number(self, word: Any) -> int:
        """Return the number of a word, a new one if need be."""
        found = self._numbers.get(word)
        if found is None:
            found = self._numbers[word] = len(self.words)
            self.words.append(word)
        return found


def world_arrays(
    coverage: Coverage, policies: Policies, classes: Sequence[str], codes: Vocabulary, sequences: Vocabulary
) -> World:
    """Return the world as arrays.

    Args:
        coverage: when we listened.
        policies: those that may be in force.
        classes: names of the device classes, by their number.
        codes: numbers of error codes; those of the flagged sequences are added.
        sequences: numbers of flagged sequences; those of the policies are added.
    """
    dated, shape = policies.dated, (len(policies.dated), len(classes))
    rules, sequence = np.empty((*shape, len(RULES)), np.int64), np.empty(shape, np.int32)
    steps = np.full((*shape, MAX_SEQUENCE), -1, np.int32)
    for p, one in enumerate(dated):
        for c, name in enumerate(classes):
            rule = one.policy.of(name)
            rules[p, c] = [getattr(rule, field) for field in RULES]
            steps[p, c, : len(rule.flagged_codes)] = [codes.number(code) for code in rule.flagged_codes]
            sequence[p, c] = sequences.number(rule.flagged_codes)
    return World(
        coverage.start_ms,
        coverage.base_ms,
        np.array([opened for opened, _ in coverage.gaps], np.int64),
        np.array([NEVER if closed is None else closed for _, closed in coverage.gaps], np.int64),
        np.array([one.effective_from_ms for one in dated], np.int64),
        rules,
        steps,
        sequence,
        np.array([one.policy.unknown_devices == "quarantine" for one in dated]),
        _FOLLOWING,
        _PRESENT,
        _HELD,
    )


assert all(name in Rules.__slots__ for name in RULES), "the rules are those of the policy"


@njit(cache=True)
def covered(world: World, instant_ms: int) -> int:
    """Return c(t), as `Coverage.covered`."""
    if instant_ms <= world.start_ms:
        return world.base_ms
    missed = 0
    for gap in range(len(world.opened)):
        if world.opened[gap] >= instant_ms:
            break
        missed += min(world.closed[gap], instant_ms) - world.opened[gap]
    return world.base_ms + instant_ms - world.start_ms - missed


@njit(cache=True)
def earliest(world: World, covered_ms: int) -> int:
    """Return the earliest t with ``c(t) >= covered_ms``, as `Coverage.earliest`; `NONE` while an open gap keeps it away."""
    at_ms, reached = world.start_ms, world.base_ms
    for gap in range(len(world.opened)):
        span = world.opened[gap] - at_ms
        if covered_ms - reached <= span:
            break
        if world.closed[gap] == NEVER:
            return NONE
        at_ms, reached = world.closed[gap], reached + span
    return at_ms + max(0, covered_ms - reached)


@njit(cache=True)
def in_force(world: World, instant_ms: int) -> int:
    """Return the number of the policy in force, as `Policies.at`."""
    policy = len(world.effective_ms) - 1
    while policy > 0 and world.effective_ms[policy] > instant_ms:
        policy -= 1
    return policy
