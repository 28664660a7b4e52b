"""Coverage and policies as arrays: what the compiled fold asks of the world at an instant.

Rule: it holds what `Coverage` and `Policies` hold, and answers the same; the laws in ``tests/property`` compare them.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.jit.cache import jit_no_refcount
from fleetpulse.core.lifecycle import HELD, PRESENT, TRANSITIONS, Mode, Trigger
from fleetpulse.core.policy import MAX_SEQUENCE, Policies, Rules
from fleetpulse.core.presence.coverage import Coverage

Int64s = NDArray[np.int64]
NONE: Final = np.iinfo(np.int64).min  # stands for no instant
NEVER: Final = np.iinfo(np.int64).max
MODES: Final = tuple(Mode)
TRIGGERS: Final = tuple(Trigger)

RULES: Final = ("timeout_ms", "death_grace_ms", "forget_after_ms", "degraded_errors", "degraded_window_ms", "flagged_window_ms",
                "flagged_hold_ms", "last_errors", "gateway_outage_limit_ms", "late_proves_alive")  # fmt: skip
(TIMEOUT, DEATH_GRACE, FORGET_AFTER, DEGRADED_ERRORS, DEGRADED_WINDOW, FLAGGED_WINDOW, FLAGGED_HOLD, LAST_ERRORS,
 OUTAGE_LIMIT, LATE_PROVES) = range(len(RULES))  # fmt: skip
STEPS: Final = len(RULES)  # the flagged sequence as error codes, -1 behind its end
SEQUENCE: Final = STEPS + MAX_SEQUENCE  # the number of that sequence
QUARANTINES: Final = SEQUENCE + 1  # whether unknown devices are listed instead of judged
EFFECTIVE: Final = QUARANTINES + 1  # from when the policy is in effect
_WIDTH: Final = EFFECTIVE + 1


class PackedContext(NamedTuple):
    """What a device is judged by: two arrays, since the compiled fold hands them from function to function.

    Attributes:
        listening: the instant before which nothing is covered, covered time then, and for each gap its first instant and
            its end (`NEVER` where it is still open).
        rules: policy x class x what each is: `RULES`, `STEPS`, `SEQUENCE`, `QUARANTINES`, `EFFECTIVE`; policies in the order
            in which they take effect.
    """

    listening: Int64s
    rules: Int64s


def _following() -> NDArray[np.int8]:
    table = np.full((len(MODES), len(TRIGGERS)), -1, np.int8)
    for (mode, trigger), target in TRANSITIONS.items():
        table[MODES.index(mode), TRIGGERS.index(trigger)] = MODES.index(target)
    return table


FOLLOWING: Final = _following()  # mode x trigger: the mode that the transition table gives; -1 where a trigger has no effect
IS_PRESENT: Final = np.array([mode in PRESENT for mode in MODES])
IS_HELD: Final = np.array([mode in HELD for mode in MODES])


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

    def numbers(self, words: pa.DictionaryArray) -> Int64s:
        """Return the numbers of words; of nothing -1."""
        indices, numbers = self.mapped(words)
        return numbers[indices]

    def mapped(self, words: pa.DictionaryArray, instead: str | None = None) -> tuple[NDArray[np.int32], Int64s]:
        """Return which word each is, and the words' numbers; of nothing that of ``instead``, or -1."""
        nothing = -1 if instead is None else self.number(instead)
        numbers = np.array([*map(self.number, words.dictionary.to_pylist()), nothing], np.int64)
        return words.indices.fill_null(len(numbers) - 1).to_numpy(), numbers


def _number(value: int | bool | None) -> int:
    return NONE if value is None else int(value)


def world_arrays(
    coverage: Coverage, policies: Policies, classes: Sequence[str], codes: Vocabulary, sequences: Vocabulary
) -> PackedContext:
    """Return the world as arrays.

    Args:
        coverage: when we listened.
        policies: those that may be in force.
        classes: names of the device classes, by their number.
        codes: numbers of error codes; those of the flagged sequences are added.
        sequences: numbers of flagged sequences; those of the policies are added.
    """
    dated = policies.dated
    rules = np.full((len(dated), len(classes), _WIDTH), -1, np.int64)
    for p, one in enumerate(dated):
        for c, name in enumerate(classes):
            rule = one.policy.of(name)
            rules[p, c, : len(RULES)] = [_number(getattr(rule, field)) for field in RULES]
            rules[p, c, STEPS : STEPS + len(rule.flagged_codes)] = [codes.number(code) for code in rule.flagged_codes]
            rules[p, c, SEQUENCE] = sequences.number(rule.flagged_codes)
        rules[p, :, QUARANTINES] = one.policy.unknown_devices == "quarantine"
        rules[p, :, EFFECTIVE] = one.effective_from_ms
    gaps = [instant for opened, closed in coverage.gaps for instant in (opened, NEVER if closed is None else closed)]
    return PackedContext(np.array([coverage.start_ms, coverage.base_ms, *gaps], np.int64), rules)


assert all(name in Rules.__slots__ for name in RULES), "the rules are those of the policy"


@jit_no_refcount
def covered(world: PackedContext, instant_ms: int) -> int:
    """Return c(t), as `Coverage.covered`."""
    listening = world.listening
    if instant_ms <= listening[0]:
        return listening[1]
    missed = 0
    for gap in range(2, len(listening), 2):
        if listening[gap] >= instant_ms:
            break
        missed += min(listening[gap + 1], instant_ms) - listening[gap]
    return listening[1] + instant_ms - listening[0] - missed


@jit_no_refcount
def earliest(world: PackedContext, covered_ms: int) -> int:
    """Return the earliest t with ``c(t) >= covered_ms``, as `Coverage.earliest`; `NONE` while an open gap keeps it away."""
    listening = world.listening
    at_ms, reached = listening[0], listening[1]
    for gap in range(2, len(listening), 2):
        span = listening[gap] - at_ms
        if covered_ms - reached <= span:
            break
        if listening[gap + 1] == NEVER:
            return NONE
        at_ms, reached = listening[gap + 1], reached + span
    return at_ms + max(0, covered_ms - reached)


@jit_no_refcount
def greatest(world: PackedContext, covered_ms: int) -> int:
    """Return the greatest t with ``c(t) <= covered_ms``, as `Coverage.greatest`; `NONE` where there is none."""
    listening = world.listening
    at_ms, reached = listening[0], listening[1]
    if covered_ms < reached:
        return NONE
    for gap in range(2, len(listening), 2):
        span = listening[gap] - at_ms
        if covered_ms - reached < span or listening[gap + 1] == NEVER:
            break
        at_ms, reached = listening[gap + 1], reached + span
    return at_ms + covered_ms - reached


@jit_no_refcount
def in_force(world: PackedContext, instant_ms: int) -> int:
    """Return the number of the policy in force, as `Policies.at`."""
    policy = len(world.rules) - 1
    while policy > 0 and world.rules[policy, 0, EFFECTIVE] > instant_ms:
        policy -= 1
    return policy
