"""Commands that a page shows: they are pasted into a shell, and ids of devices are of unknown origin."""

import shlex

import pytest

from fleetpulse.io.home.home import Home
from fleetpulse.web.actions import ACTIONS, OF_DEVICE, command

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("device", ["--home=/other", "-x", "--", "--help"])
def test_an_id_that_begins_with_a_hyphen_is_no_option(device: str, home: Home) -> None:
    of_home = ["--home", str(home.path)]
    words = {name: shlex.split(command(home, ACTIONS[name].words, device)) for name in OF_DEVICE}
    assert words == {
        "judge-again": ["./fleet", "amend", "--device", device, *of_home],
        "hold": ["./fleet", "device", "maintain", "--for", "2h", *of_home, "--", device],
        "confirm": ["./fleet", "device", "confirm", *of_home, "--", device],
        "release": ["./fleet", "device", "release", *of_home, "--", device],
    }
    assert shlex.split(command(home, ACTIONS["release"].words, "a b"))[3] == "a b"
