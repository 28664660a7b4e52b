"""Comparison of installed packages with a lock, which may pin another version for each Python."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fleetpulse.core.errors import FleetError

_LISTED = 3


def require_packages(lock: Path) -> int:
    """Check that the packages of a lock are installed in its versions; return their number.

    A package that the lock restricts to some systems or Pythons may be missing.

    Raises:
        FleetError: the lock cannot be read, or packages are missing or have other versions.
    """
    try:
        lines = [line for line in lock.read_text().splitlines() if "==" in line and not line.startswith((" ", "#"))]
    except OSError as error:
        raise FleetError(
            f'the lock "{lock}" cannot be read ({error.strerror}); restore the installation of this project',
            code="lock-unreadable",
        ) from None
    pinned: dict[str, set[str]] = {}
    optional: set[str] = set()
    for line in lines:
        requirement, _, marker = line.rstrip(" \\").partition(";")
        name, _, wanted = requirement.strip().partition("==")
        pinned.setdefault(name.partition("[")[0], set()).add(wanted)
        if marker:
            optional.add(name.partition("[")[0])
    differing: list[str] = []
    count = 0
    for name, versions in pinned.items():
        found = _installed(name)
        count += found is not None
        if found not in versions and not (found is None and name in optional):
            differing.append(f"{name} {found or 'is missing'} instead of {' or '.join(sorted(versions))}")
    if differing:
        more = f", and {len(differing) - _LISTED} more" if len(differing) > _LISTED else ""
        raise FleetError(
            f"installed packages differ from {lock.name}: {', '.join(differing[:_LISTED])}{more}; remove the virtual environment "
            f"and start ./fleet again, which installs the locked packages",
            code="packages-differ",
        )
    return count


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
