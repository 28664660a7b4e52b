"""Home folder: a suitable one is used, any other is refused with one sentence."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batch.quality.rejudge import is_whole, origin_of
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.replay import Deployment
from fleetpulse.io.home.home import BRIDGE, Home
from fleetpulse.settings import Settings
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", ["a[b]", "per%20cent", "all*", "back\\slash"])
def test_home_path_that_breaks_table_reads_is_refused_and_not_created(name: str, tmp_path: Path) -> None:
    with refused("home-path-invalid"):
        Home(tmp_path / name).prepare(None)
    assert not (tmp_path / name).exists()


def test_file_and_path_below_a_file_are_refused_as_home(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused("home-not-a-folder"):
            Home(path).record()
        with refused("home-unwritable"):
            Home(path).prepare(None)


def test_folder_with_foreign_files_is_refused_as_home(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with refused("home-folder-not-empty"):
        Home(tmp_path).prepare(None)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_home_may_be_created_beside_its_settings_and_opened_again(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("")
    Home(tmp_path).prepare(None)
    (tmp_path / "note.txt").write_text("mine")
    Home(tmp_path).prepare(None)


@pytest.mark.parametrize(
    "name", ["settings.toml", "mapping.toml", "policy.toml", "tls/broker.pem", "spark.key", "mapping.toml.new"]
)
def test_home_may_be_created_around_files_of_its_operator(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    Home(tmp_path).prepare(None)


@pytest.mark.parametrize("absolute", [False, True])
def test_home_may_be_created_around_files_that_its_settings_name(tmp_path: Path, absolute: bool) -> None:
    settings = Settings(broker_certificate=str(tmp_path / "certs/a.pem") if absolute else "certs/a.pem", spark_key="/etc/key")
    (tmp_path / "certs").mkdir()
    (tmp_path / "certs" / "a.pem").write_text("")
    with refused("home-folder-not-empty"):
        Home(tmp_path).prepare(None)
    (tmp_path / "thesis.tex").write_text("")
    with refused("home-folder-not-empty", match="contains thesis.tex;"):
        Home(tmp_path).prepare(None, files=settings.files())
    (tmp_path / "thesis.tex").unlink()
    Home(tmp_path).prepare(None, files=settings.files())


def test_settings_list_each_file_that_they_name() -> None:
    named = [name for name, field in Settings.model_fields.items() if name.startswith("broker_") and field.default == ""]
    given = {name: name for name in (*named, "spark_key")}
    assert sorted(Settings(**given).files()) == sorted(given)  # pyright: ignore[reportArgumentType] - all are text


def test_only_the_owner_can_enter_the_folders_of_a_new_home(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    new, existing = Home(tmp_path / "new"), Home(tmp_path / "existing")
    existing.path.mkdir(0o755)
    for home in (new, existing):
        home.prepare(None)
    folders = [new.path, *(path for home in (new, existing) for path in home.path.rglob("*") if path.is_dir())]
    assert len(folders) == 17
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert existing.path.stat().st_mode & 0o777 == 0o755, "the mode of a folder that the user created is left alone"


def test_home_keeps_its_verdict_jitter(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(Deployment(60_000, 300_000, 600_000))
    home.prepare(None)
    assert home.deployment().verdict_jitter_ms == 600_000
    with refused("home-deployment-differs"):
        home.prepare(Deployment())


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("{}", "home-foreign"),
        ("[]", "home-foreign"),
        ('"text"', "home-foreign"),
        ("{", "home-damaged"),
        ('{"version": 99}', "home-version-unsupported"),
    ],
)
def test_foreign_or_damaged_home_record_is_refused(content: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "home.json").write_text(content)
    with refused(code):
        Home(tmp_path).record()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder_is_refused_with_a_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with refused("home-unwritable", match="make it writable"):
        Home(tmp_path / "home").prepare(None)


def test_owner_of_a_home_is_visible_without_write_permission(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(None)
    assert home.owner() is None
    with home.locked("a test"):
        (home.path / "lock").chmod(0o400)
        assert home.owner() == os.getpid()
        with refused("home-in-use"), home.locked("another"):
            pass
    assert home.owner() is None


def test_client_id_of_a_session_is_secret_and_stable(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.prepare(None)
    name = home.session(BRIDGE)
    assert len(name) == 23
    assert name not in (Home(tmp_path / "other").path.name, home.session("replay"))
    assert Home(tmp_path).session(BRIDGE) == name
    assert (home.broker / f"{BRIDGE}.session").stat().st_mode & 0o077 == 0


def test_canary_key_is_random_secret_and_shared_by_concurrent_bridges(tmp_path: Path) -> None:
    homes = [Home(tmp_path / name) for name in ("one", "other")]
    for home in homes:
        home.prepare(None)
    with ThreadPoolExecutor(8) as pool:
        keys = [{*pool.map(lambda _, at=home: Home(at.path).canary_key(), range(8))} for home in homes]
    assert [len(each) for each in keys] == [1, 1], "all bridges of a home have its key"
    assert keys[0] != keys[1] and all(len(key) == 32 for each in keys for key in each)
    assert (homes[0].broker / "canary.key").stat().st_mode & 0o077 == 0
    assert not list(homes[0].broker.glob(".canary*")), "no draft is left"


def test_home_with_segments_of_an_older_version_keeps_the_former_client_id(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.prepare(None)
    (home.segments / "000000000001.arrow").touch()
    assert home.session(BRIDGE) == "fleetpulse-bridge-1"


def test_home_on_a_file_system_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with refused("hard-links-missing"):
        Home(tmp_path / "home").prepare(None)


def test_home_of_version_1_is_not_judged_again_from_its_first_row(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(None)
    assert (home.judged_by_version_1_ms(), is_whole(home)) == (None, True)
    record = home.record()
    del record["identity"]  # version 1 does not have this field
    (home.path / "home.json").write_text(json.dumps(record))
    assert (home.judged_by_version_1_ms(), is_whole(home)) == (0, False)
    home.prepare(None)
    assert (home.identity(), home.judged_by_version_1_ms(), is_whole(home)) == (DeviceIdentity.ID, 0, False)
    assert origin_of(home, 1) is None, "this version has taken no snapshot"


def test_number_of_key_groups_is_that_of_the_first_start(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(None, key_groups=20)
    home.prepare(None, key_groups=39)
    assert home.key_groups() == 20
