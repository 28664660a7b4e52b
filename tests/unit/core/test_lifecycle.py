"""Transition table of the lifecycle: it equals a matrix that was reviewed by hand."""

from itertools import product

from fleetpulse.core.lifecycle import TRANSITIONS, Mode, Trigger, next_mode
from fleetpulse.paths import ROOT

GOLDEN = ROOT / "tests" / "golden" / "transitions.txt"


def _golden() -> set[tuple[str, str, str]]:
    lines = [line.split() for line in GOLDEN.read_text().splitlines() if line and not line.startswith("#")]
    return {(mode, trigger, target) for mode, trigger, target in lines}


def test_the_transition_table_equals_the_reviewed_matrix() -> None:
    table = {
        (mode.value, trigger.value, "live" if target is Mode.ONLINE else target.value)
        for (mode, trigger), target in TRANSITIONS.items()
    }
    assert table == _golden()


def test_every_mode_leads_to_removal() -> None:
    leading = {Mode.FORGOTTEN}
    for _ in Mode:
        leading |= {mode for (mode, _), target in TRANSITIONS.items() if target in leading}
    assert leading == set(Mode)


def test_errors_change_the_mode_only_of_a_device_heard_in_time() -> None:
    for mode, trigger in product(Mode, Trigger):
        target = TRANSITIONS.get((mode, trigger))
        modes = {
            (heard, degraded, flagged): next_mode(mode, trigger, heard=heard, degraded=degraded, flagged=flagged)
            for heard, degraded, flagged in product((False, True), repeat=3)
        }
        if target is Mode.ONLINE:
            assert {modes[False, degraded, flagged] for degraded in (False, True) for flagged in (False, True)} == {
                Mode.PROVISIONED
            }
            assert modes[True, False, False] is Mode.ONLINE
            assert modes[True, True, False] is Mode.DEGRADED
            assert modes[True, False, True] is modes[True, True, True] is Mode.FLAGGED
        else:
            assert set(modes.values()) == {target or mode}


def test_stored_names_of_modes_do_not_change() -> None:
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
