"""File systems: each missing property is found, and types known not to suit a home are named."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.io.system.file_systems import (
    Mount,
    mount_of,
    require_hard_links,
    require_locks,
    require_renames,
    require_suitable,
    require_syncs,
)
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def links(folder: Path) -> None:
    (folder / "file").touch()
    try:
        require_hard_links(folder / "file", folder / "link")
    finally:
        (folder / "file").unlink()


def unsupported(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def replacing(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


def nothing(*_: Any, **__: Any) -> None:
    """Report success and do nothing, as some network file systems do."""


@pytest.mark.parametrize("check", [links, require_renames, require_locks, require_syncs])
def test_a_local_disk_suits_a_home_and_no_file_is_left(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("check", "owner", "name", "instead", "code"),
    [
        (links, os, "link", unsupported, "hard-links-missing"),
        (links, os, "link", replacing, "hard-links-replace"),
        (require_renames, Path, "rename", unsupported, "renames-faulty"),
        (require_renames, Path, "rename", nothing, "renames-faulty"),
        (require_locks, fcntl, "flock", unsupported, "locks-faulty"),
        (require_locks, fcntl, "flock", nothing, "locks-faulty"),
        (require_syncs, os, "fsync", unsupported, "syncs-faulty"),
    ],
)
def test_a_missing_property_is_an_error_and_no_file_is_left(
    check: Callable[[Path], None],
    owner: Any,
    name: str,
    instead: Callable[..., None],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, instead)
    with refused(code):
        check(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_lock_that_another_holder_never_releases_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def inherited(file: Any, operation: int) -> None:
        held.append(os.dup(file.fileno()))  # a second descriptor keeps the lock beyond the close of the first
        flock(file, operation)

    held: list[int] = []
    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", inherited)
    with refused("locks-faulty", match="stays held"):
        require_locks(tmp_path)
    os.close(held[0])


MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:45 / /srv/my\040fleet rw,relatime - nfs4 10.0.0.2:/fleet rw,vers=4.2,local_lock=none
41 22 0:46 / /mnt/bucket rw - fuse.s3fs s3fs rw
42 22 0:47 / /mnt/old rw - nfs 10.0.0.2:/old rw,vers=3,local_lock=all
"""


@pytest.mark.parametrize(
    ("path", "point", "type"),
    [("/srv/my fleet/home", "/srv/my fleet", "nfs4"), ("/srv/my", "/", "ext4"), ("/mnt/bucket", "/mnt/bucket", "fuse.s3fs")],
)
def test_the_mount_of_a_path_is_the_nearest_above_it(path: str, point: str, type: str, tmp_path: Path) -> None:  # noqa: A002
    (tmp_path / "mountinfo").write_text(MOUNTS)
    found = mount_of(Path(path), tmp_path / "mountinfo")
    assert found is not None
    assert (found.point, found.type) == (Path(point), type)
    assert mount_of(Path(path), tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("type", "options", "shared"),
    [("fuse.s3fs", "rw", False), ("nfs", "local_lock=all", True), ("lustre", "localflock", True), ("fuse.sshfs", "rw", True)],
)
def test_types_known_not_to_suit_a_home_are_refused(type: str, options: str, shared: bool) -> None:  # noqa: A002
    with refused("file-system-unsuitable", match=type):
        require_suitable(Mount(Path("/srv"), type, frozenset({options})), shared=shared)


def test_locks_of_one_host_suffice_without_a_cluster_and_a_local_disk_is_named_with_one() -> None:
    assert require_suitable(Mount(Path("/srv"), "nfs", frozenset({"nolock"})), shared=False) == "nfs on /srv"
    assert require_suitable(Mount(Path("/srv"), "nfs4", frozenset({"local_lock=none"})), shared=True) == "nfs4 on /srv"
    assert "on this host" in require_suitable(Mount(Path("/srv"), "ext4", frozenset()), shared=True)
