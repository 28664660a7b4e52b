"""Lock files: every package is pinned and hashed, and there is no address or local path."""

import json
import re
from pathlib import Path

import pytest

from cli.dev.commands import lock_faults, read_lock
from fleetpulse.paths import ROOT

LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def test_each_kind_of_environment_and_the_tools_of_an_installation_have_a_lock() -> None:
    assert [path.name for path in LOCKS] == ["build.txt", "dev.txt", "operations.txt", "runtime.txt", "uv.txt"]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_names_no_address_and_no_folder(path: Path) -> None:
    text = path.read_text()
    assert "://" not in text
    assert not re.findall(r"(?:^|\s)/\w[^\s]*|file:|--(?:extra-)?index-url|--find-links", text)


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_package_is_pinned_and_hashed(path: Path) -> None:
    entries = re.split(r"\n(?=\S)", path.read_text())
    packages = [entry for entry in entries if not entry.startswith("#")]
    assert len(packages) == sum(len(versions) for versions, _ in read_lock(path).values())
    assert not [entry.split()[0] for entry in packages if "--hash=sha256:" not in entry]


def test_the_lock_of_the_external_clients_is_hashed_and_names_no_address() -> None:
    lock = json.loads((ROOT / "tests" / "e2e" / "clients" / "package-lock.json").read_text())
    packages = [package for name, package in lock["packages"].items() if name]
    assert packages
    assert all("resolved" not in package and package["integrity"].startswith("sha512-") for package in packages)
    assert "http" not in json.dumps(lock)


def test_the_locks_follow_from_the_project_file() -> None:
    assert lock_faults() == []
