"""Desired state: it is stored with its author, and a temporary stop ends with its process."""

from fleetpulse.io.home.desired_state import RUNNING, STOPPED, get_desired, set_desired, temporarily_stopped
from fleetpulse.io.home.home import Home
from tests.support.refusals import refused


def test_desired_state_is_stored_with_its_author(home: Home) -> None:
    assert get_desired(home).state == RUNNING
    set_desired(home, STOPPED, "ann")
    assert (get_desired(home).state, get_desired(home).by) == (STOPPED, "ann")
    (home.path / "desired.json").write_text("no")
    with refused("desired-state-damaged"):
        get_desired(home)


def test_temporary_stop_ends_with_its_process(home: Home) -> None:
    with temporarily_stopped(home, "a canary"):
        assert get_desired(home).state == STOPPED
        content = (home.path / "desired.json").read_text()
        with refused("stream-stopped-by-other"), temporarily_stopped(home, "another"):
            pass
    assert (get_desired(home).state, get_desired(home).by) == (RUNNING, "nobody yet")
    (home.path / "desired.json").write_text(content)  # as a killed process leaves it
    assert get_desired(home).state == RUNNING


def test_desired_state_set_during_a_temporary_stop_is_kept(home: Home) -> None:
    with temporarily_stopped(home, "a canary"):
        set_desired(home, STOPPED, "ann")
    assert (get_desired(home).state, get_desired(home).by) == (STOPPED, "ann")


def test_temporary_stop_keeps_an_earlier_stop_and_its_author(home: Home) -> None:
    before = set_desired(home, STOPPED, "ann")
    with temporarily_stopped(home, "a canary"):
        assert get_desired(home) == before
    assert get_desired(home) == before


def test_conditional_update_does_not_override_a_newer_desired_state(home: Home) -> None:
    read = get_desired(home)
    other = set_desired(home, STOPPED, "ann", only_if=read)
    assert other == get_desired(home)
    assert set_desired(home, RUNNING, "a supervisor", only_if=read) is None
    assert get_desired(home) == other
