"""Groups of versions that compaction writes to one file."""

import pytest

from fleetpulse.io.maintenance.compaction import BronzeFile, VersionRange, groups

pytestmark = pytest.mark.unit
MIB = 1024 * 1024


def _versions(*sizes_mib: int) -> list[VersionRange]:
    """Return one version of day 0 for each file size."""
    files = [BronzeFile(f"{number}", size * MIB, 1, number, number) for number, size in enumerate(sizes_mib)]
    return [VersionRange(number, number + 1, (file,)) for number, file in enumerate(files)]


def _begins(units: list[VersionRange], today: int) -> list[list[int]]:
    return [[unit.begin for unit in group] for group in groups(units, set(), today)]


@pytest.mark.parametrize(
    ("sizes_mib", "begins"),
    [
        ((1, 1, 1), [[0, 1, 2]]),
        ((32, 32, 1, 1), [[0, 1], [2, 3]]),  # 64 MiB fill a file
        ((32, 33, 1), [[1, 2]]),  # the first file stays as it is
        ((64, 1, 1), [[1, 2]]),
        ((100,), []),
    ],
)
def test_a_compacted_file_has_at_most_64_mib(sizes_mib: tuple[int, ...], begins: list[list[int]]) -> None:
    assert _begins(_versions(*sizes_mib), today=1) == begins


@pytest.mark.parametrize(("files", "compacted"), [(9, False), (10, True)])
def test_files_of_the_current_day_are_compacted_from_ten_on(files: int, compacted: bool) -> None:
    assert _begins(_versions(*[1] * files), today=0) == [[*range(files)]] * compacted
