"""The table has a second witness: a matrix reviewed by hand."""

from itertools import product

from fleetpulse.core.lifecycle import TRANSITIONS, Mode, Trigger, next_mode
from fleetpulse.paths import ROOT

GOLDEN = ROOT / "tests" / "golden" / "transitions.txt"


def _golden() -> set[tuple[str, str, str]]:
    lines = [line.split() for line in GOLDEN.read_text().splitlines() if line and not line.startswith("#")]
    return {(mode, trigger, target) for mode, trigger, target in lines}


def test_the_table_is_the_one_that_was_reviewed() -> None:
    table = {
        (mode.value, trigger.value, "live" if target is Mode.ONLINE else target.value)
        for (mode, trigger), target in TRANSITIONS.items()
    }
    assert table == _golden()


def test_every_mode_leads_to_removal() -> None:
    reaches = {Mode.FORGOTTEN}
    for _ in Mode:
        reaches |= {mode for (mode, _), target in TRANSITIONS.items() if target in reaches}
    assert reaches == set(Mode)


def test_facts_dress_a_device_that_is_heard_in_time_and_nothing_else() -> None:
    for mode, trigger in product(Mode, Trigger):
        target = TRANSITIONS.get((mode, trigger))
        got = {
            (heard, degraded, flagged): next_mode(mode, trigger, heard=heard, degraded=degraded, flagged=flagged)
            for heard, degraded, flagged in product((False, True), repeat=3)
        }
        if target is Mode.ONLINE:
            assert {got[False, d, f] for d in (False, True) for f in (False, True)} == {Mode.PROVISIONED}
            assert got[True, False, False] is Mode.ONLINE
            assert got[True, True, False] is Mode.DEGRADED
            assert got[True, False, True] is got[True, True, True] is Mode.FLAGGED
        else:
            assert set(got.values()) == {target or mode}


def test_stored_words_are_what_history_holds() -> None:
    assert {mode.value for mode in Mode} == {
        "provisioned",
        "online",
        "degraded",
        "offline",
        "updating",
        "maintenance",
        "flagged",
        "decommissioned",
        "forgotten",
        "unreachable",
    }
