"""Runner of the planted faults: ``./fleet test mutants`` checks that the tests of each fault catch it.

Rule 1: the working tree is not changed; faults are planted in a copy of the sources, which is removed at the end.
Rule 2: the tests must first pass without a fault; otherwise their failure would prove nothing.
Rule 3: a fault is caught if a test fails. A module that cannot be imported or collected catches nothing.
Rule 4: the exit code is 1 if a fault survives, if the list is stale, or if a run of pytest proves nothing.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path
from typing import Final, NamedTuple

from fleetpulse.paths import ROOT
from tests.mutants.faults import FAULTS, INTERPRETED, Change, Fault

SOURCES: Final = ("fleetpulse", "streaming", "batch", "cli", "dags", "bench", "infra", "docs", "requirements", "tests")
FILES: Final = (
    "pyproject.toml",
    "fleet",
    "docker-compose.yml",
    "docker-compose.cluster.yml",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)
_LEFT_OUT: Final = shutil.ignore_patterns("__pycache__", "node_modules", "images")
_FAILED: Final = 1  # exit code of pytest if some tests failed
_SHOWN: Final = 40  # lines of the output of pytest that are shown if a run proves nothing


class Outcome(NamedTuple):
    """Result of one run of pytest.

    Attributes:
        code: exit code of pytest.
        failed: first test that failed; None if no test failed.
        output: complete output of pytest.
    """

    code: int
    failed: str | None
    output: str

    @property
    def end(self) -> str:
        """The last lines of the output."""
        return "\n".join(self.output.splitlines()[-_SHOWN:])


def stale(faults: Iterable[Fault], root: Path) -> list[str]:
    """Return an error for each old text that does not occur exactly once, and for each missing test."""
    errors = _misplaced("the interpreted fold", INTERPRETED, root)
    for fault in faults:
        errors += _misplaced(f'fault "{fault.name}"', fault.changes, root)
        for test in fault.tests:
            file, _, name = test.partition("::")
            path = root / file
            if not path.is_file() or f"def {name}(" not in path.read_text():
                errors.append(f'fault "{fault.name}": there is no test "{test}"; correct tests/mutants/faults.py')
    return errors


def _misplaced(owner: str, changes: Iterable[Change], root: Path) -> list[str]:
    counts = [
        (change, (root / change.file).read_text().count(change.old) if (root / change.file).is_file() else 0)
        for change in changes
    ]
    return [
        f"{owner}: its old text must stand in {change.file} once; found {count} times; "
        f"correct tests/mutants/faults.py: {change.old!r}"
        for change, count in counts
        if count != 1
    ]


def copy_sources(root: Path, target: Path) -> None:
    """Copy the files that the tests read from a working tree, without leftovers of earlier runs."""
    for name in SOURCES:
        shutil.copytree(root / name, target / name, ignore=_LEFT_OUT)
    for name in FILES:
        shutil.copy2(root / name, target / name)
    for change in INTERPRETED:
        _change(target, change)


@contextmanager
def planted(fault: Fault, tree: Path) -> Iterator[None]:
    """Plant a fault in a copy of the sources, and remove it afterwards."""
    before = {change.file: (tree / change.file).read_text() for change in fault.changes}
    try:
        for change in fault.changes:
            _change(tree, change)
        yield
    finally:
        for file, text in before.items():
            _write(tree / file, text)


def _change(tree: Path, change: Change) -> None:
    path = tree / change.file
    _write(path, path.read_text().replace(change.old, change.new))


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    # Python compares only size and whole seconds, so it could reuse the old bytecode for a new file of the same size.
    Path(cache_from_source(path)).unlink(missing_ok=True)


def run_tests(tests: Sequence[str], environment: Mapping[str, str], tree: Path) -> Outcome:
    """Run tests in a copy of the sources, up to the first failure."""
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    # More examples than the suite, the same each time, without shrinking.
    variables = {"FLEET_PROFILE": "mutants", "FLEET_STEPS": "80000", **environment}
    variables |= {"PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(tree / ".numba")}  # compiled faults are not cached outside
    done = subprocess.run(command, cwd=tree, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    failed = next((line.split(" ", 2)[1] for line in lines if line.startswith("FAILED ")), None)
    return Outcome(done.returncode, failed, done.stdout + done.stderr)


def _fails_without_fault(faults: Iterable[Fault], tree: Path) -> str | None:
    """Run the tests of all faults without a fault; return the output if some fail."""
    by_environment: dict[tuple[tuple[str, str], ...], dict[str, None]] = {}
    for fault in faults:
        by_environment.setdefault(fault.environment, {}).update(dict.fromkeys(fault.tests))
    for environment, tests in by_environment.items():
        found = run_tests(list(tests), dict(environment), tree)
        if found.code:
            return found.end
    return None


def try_faults(faults: Sequence[Fault]) -> int:
    """Plant each fault in turn, and print the test that catches it; return the exit code."""
    if errors := stale(faults, ROOT):
        print("\n".join(errors), file=sys.stderr)
        return 1
    caught, proved = 0, True
    with tempfile.TemporaryDirectory(prefix="fleet-mutants-") as folder:
        tree = Path(folder, "tree")
        copy_sources(ROOT, tree)
        began = time.monotonic()
        if failing := _fails_without_fault(faults, tree):
            print(f"{failing}\nthe tests must pass without a fault; the end of their output is above", file=sys.stderr)
            return 1
        print(f"all tests pass without a fault, in {time.monotonic() - began:.0f} s", flush=True)
        for fault in faults:
            began = time.monotonic()
            with planted(fault, tree):
                found = run_tests(fault.tests, dict(fault.environment), tree)
            took = f"in {time.monotonic() - began:.0f} s"
            if found.code == _FAILED and found.failed:
                caught += 1
                print(f"{fault.name}: caught by {found.failed} {took}", flush=True)
            elif found.code == 0:
                print(f"{fault.name}: SURVIVED {', '.join(fault.tests)} {took}", flush=True)
            else:
                proved = False
                print(f"{found.end}\n{fault.name}: NOT PROVED, no test failed; pytest ended with {found.code}", flush=True)
    print(f"{caught} of {len(faults)} planted faults are caught")
    return 0 if caught == len(faults) and proved else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, and list or try the chosen faults."""
    parser = argparse.ArgumentParser(prog="fleet test mutants", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="try only this fault; can be repeated")
    parser.add_argument("--list", action="store_true", help="list the faults and their tests")
    options = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    if unknown := {*(options.only or ())} - {fault.name for fault in FAULTS}:
        parser.error(f'there is no fault "{min(unknown)}"; ./fleet test mutants --list shows all')
    if options.list:
        for fault in chosen:
            print(f"{fault.name}: {', '.join(change.file for change in fault.changes)}; {', '.join(fault.tests)}")
        return 0
    return try_faults(chosen)


if __name__ == "__main__":
    sys.exit(main())
