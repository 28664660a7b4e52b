"""Preconditions of a home: its owner, the clock of the machine, and secrets that only the owner can read."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetpulse.io.home import preconditions
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.preconditions import existing_folder, require_clock, require_own, require_private_secrets
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.prepare(None)
    return made


def test_a_home_belongs_to_its_owner_alone(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    require_own(home)
    monkeypatch.setattr(preconditions, "os", SimpleNamespace(geteuid=lambda: os.geteuid() + 1, access=os.access, W_OK=2, X_OK=1))
    with refused("home-of-another-user"):
        require_own(home)


def test_a_folder_that_cannot_be_written_is_refused_before_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Home(tmp_path / "a" / "home")
    require_own(absent)
    assert existing_folder(absent) == tmp_path
    monkeypatch.setattr(os, "access", lambda *_: False)
    with refused("home-unwritable"):
        require_own(absent)


def test_a_clock_apart_from_the_file_system_is_refused(home: Home) -> None:
    for lead_s, relation in ((120, "ahead of"), (-120, "behind")):
        with refused("clock-differs", match=relation):
            require_clock(home, time.time() + lead_s)


def test_a_clock_behind_the_newest_file_is_refused_and_nothing_is_left(home: Home) -> None:
    before = sorted(home.path.rglob("*"))
    assert require_clock(home).startswith("after the newest file")
    status = home.run("bridge")
    status.touch()
    future_s = time.time() + 3_600
    os.utime(status, (future_s, future_s))
    with refused("clock-behind", match=r"bridge\.json"):
        require_clock(home)
    status.unlink()
    assert sorted(home.path.rglob("*")) == before


def test_a_secret_that_others_can_read_is_refused_unless_its_folder_is_closed(home: Home) -> None:
    home.canary_key()
    key = home.broker / "canary.key"
    key.chmod(0o644)
    assert require_private_secrets(home) == 1
    home.broker.chmod(0o755)
    with refused("secret-exposed", match=r"canary\.key"):
        require_private_secrets(home)
    key.chmod(0o600)
    named = home.path / "spark.key"
    named.write_text("secret")
    named.chmod(0o644)
    home.path.chmod(0o755)
    with refused("secret-exposed", match=r"spark\.key"):
        require_private_secrets(home, [named])
