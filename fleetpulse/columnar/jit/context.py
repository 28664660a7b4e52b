"""Coverage and policies as arrays for the compiled fold.

Rule: contents and results equal those of `Coverage` and `Policies`; the laws in ``tests/property``
compare them.
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
from fleetpulse.core.rows import RANK, Kind

Int64s = NDArray[np.int64]
NONE: Final = np.iinfo(np.int64).min  # null of int64 columns
NEVER: Final = np.iinfo(np.int64).max
MODES: Final = tuple(Mode)
TRIGGERS: Final = tuple(Trigger)

RULES: Final = ("timeout_ms", "death_grace_ms", "forget_after_ms", "degraded_errors", "degraded_window_ms", "flagged_window_ms",
                "flagged_hold_ms", "last_errors", "gateway_outage_limit_ms", "late_proves_alive", "session_idle_ms",
                "velocity_events", "velocity_hold_ms")  # fmt: skip
(TIMEOUT, DEATH_GRACE, FORGET_AFTER, DEGRADED_ERRORS, DEGRADED_WINDOW, FLAGGED_WINDOW, FLAGGED_HOLD, LAST_ERRORS,
 OUTAGE_LIMIT, LATE_PROVES, SESSION_IDLE, VELOCITY_EVENTS, VELOCITY_HOLD) = range(len(RULES))  # fmt: skip
STEPS: Final = len(RULES)  # first column of the flagged sequence: error codes, -1 after its end
SEQUENCE: Final = STEPS + MAX_SEQUENCE  # number of the flagged sequence
VELOCITY_KIND: Final = SEQUENCE + 1  # rank of the kind that the velocity rule counts, -1 if it is off
VELOCITY_CODE: Final = VELOCITY_KIND + 1  # code that the velocity rule counts, -1 for any
QUARANTINES: Final = VELOCITY_CODE + 1  # whether unknown devices are listed instead of judged
EFFECTIVE: Final = QUARANTINES + 1  # instant from which the policy is in effect
_WIDTH: Final = EFFECTIVE + 1


class PackedContext(NamedTuple):
    """Evaluation context as two arrays, which compiled functions can pass on cheaply.

    Attributes:
        listening: instant before which nothing is covered, covered time at that instant, then start
            and end of each gap (`NEVER` while it is open).
        rules: policy x class x column, with columns `RULES`, `STEPS`, `SEQUENCE`, `VELOCITY_KIND`,
            `VELOCITY_CODE`, `QUARANTINES`, `EFFECTIVE`; policies in the order in which they take effect.
    """

    listening: Int64s
    rules: Int64s


def _following() -> NDArray[np.int8]:
    table = np.full((len(MODES), len(TRIGGERS)), -1, np.int8)
    for (mode, trigger), target in TRANSITIONS.items():
        table[MODES.index(mode), TRIGGERS.index(trigger)] = MODES.index(target)
    return table


FOLLOWING: Final = _following()  # mode x trigger: next mode by the transition table; -1 if the trigger has no effect
IS_PRESENT: Final = np.array([mode in PRESENT for mode in MODES])
IS_HELD: Final = np.array([mode in HELD for mode in MODES])


class Vocabulary:
    """Dictionary encoding of words: numbers in the order of first occurrence."""

    def __init__(self, words: Sequence[Any] = ()) -> None:
        self.words = list(words)
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def number(self, word: Any) -> int:
        """Return the number of a word; add the word if it is new."""
        found = self._numbers.get(word)
        if found is None:
            found = self._numbers[word] = len(self.words)
            self.words.append(word)
        return found

    def numbers(self, words: pa.DictionaryArray) -> Int64s:
        """Return the number of each word; -1 for null."""
        indices, numbers = self.mapped(words)
        return numbers[indices]

    def mapped(self, words: pa.DictionaryArray, instead: str | None = None) -> tuple[NDArray[np.int32], Int64s]:
        """Return the index of each row's word, and the numbers by index.

        Args:
            words: words of the rows.
            instead: word that replaces null; None gives null the number -1.
        """
        nothing = -1 if instead is None else self.number(instead)
        numbers = np.array([*map(self.number, words.dictionary.to_pylist()), nothing], np.int64)
        return words.indices.fill_null(len(numbers) - 1).to_numpy(), numbers


def _number(value: int | bool | None) -> int:
    return NONE if value is None else int(value)


def packed_context(
    coverage: Coverage, policies: Policies, classes: Sequence[str], codes: Vocabulary, sequences: Vocabulary
) -> PackedContext:
    """Return coverage and policies as arrays.

    Args:
        coverage: coverage of a shard.
        policies: policies that may be in force.
        classes: names of the device classes, by number.
        codes: numbers of error codes; codes of the flagged sequences and of velocity rules are added.
        sequences: numbers of flagged sequences; sequences of the policies are added.
    """
    dated = policies.dated
    rules = np.full((len(dated), len(classes), _WIDTH), -1, np.int64)
    for p, one in enumerate(dated):
        for c, name in enumerate(classes):
            rule = one.policy.of(name)
            rules[p, c, : len(RULES)] = [_number(getattr(rule, field)) for field in RULES]
            rules[p, c, STEPS : STEPS + len(rule.flagged_codes)] = [codes.number(code) for code in rule.flagged_codes]
            rules[p, c, SEQUENCE] = sequences.number(rule.flagged_codes)
            if rule.velocity_events is not None:
                rules[p, c, VELOCITY_KIND] = RANK[Kind(rule.velocity_kind)]
                if rule.velocity_code is not None and rule.velocity_kind == Kind.ERROR:
                    rules[p, c, VELOCITY_CODE] = codes.number(rule.velocity_code)
        rules[p, :, QUARANTINES] = one.policy.unknown_devices == "quarantine"
        rules[p, :, EFFECTIVE] = one.effective_from_ms
    gaps = [instant for opened, closed in coverage.gaps for instant in (opened, NEVER if closed is None else closed)]
    return PackedContext(np.array([coverage.start_ms, coverage.base_ms, *gaps], np.int64), rules)


assert all(name in Rules.__slots__ for name in RULES), "RULES names fields of core.policy.Rules"


@jit_no_refcount
def covered(context: PackedContext, instant_ms: int) -> int:
    """Return c(t), as `Coverage.covered`."""
    listening = context.listening
    if instant_ms <= listening[0]:
        return listening[1]
    missed = 0
    for gap in range(2, len(listening), 2):
        if listening[gap] >= instant_ms:
            break
        missed += min(listening[gap + 1], instant_ms) - listening[gap]
    return listening[1] + instant_ms - listening[0] - missed


@jit_no_refcount
def earliest(context: PackedContext, covered_ms: int) -> int:
    """Return the earliest t with ``c(t) >= covered_ms``, as `Coverage.earliest`.

    `NONE` if an open gap prevents it.
    """
    listening = context.listening
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
def greatest(context: PackedContext, covered_ms: int) -> int:
    """Return the greatest t with ``c(t) <= covered_ms``, as `Coverage.greatest`.

    `NONE` if there is none.
    """
    listening = context.listening
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
def policy_at(context: PackedContext, instant_ms: int) -> int:
    """Return the index of the policy in force at an instant, as `Policies.at`."""
    policy = len(context.rules) - 1
    while policy > 0 and context.rules[policy, 0, EFFECTIVE] > instant_ms:
        policy -= 1
    return policy
