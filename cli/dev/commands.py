"""Verbs of contributors: test, lint, lock, sbom, bench.

Rule: all checks run, even if one fails. The last line names the failed checks, and the exit code
is 1.
"""

import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cli.common.bootstrap import KINDS, EnvironmentFault, find_uv
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.times import parse_duration_ms
from fleetpulse.paths import ROOT

LOCKS: Final = {  # in this order: larger locks, with more requirements, constrain the versions of smaller ones
    "dev": ["pyproject.toml", "--extra", "operations", "--extra", "dev"],
    "operations": ["pyproject.toml", "--extra", "operations", "--constraint", "requirements/dev.txt"],
    "runtime": ["pyproject.toml", "--constraint", "requirements/operations.txt"],
    "build": ["-"],
    "uv": ["-"],
}
_STDIN: Final = {"build": "setuptools\n", "uv": "uv\n"}  # requirements that are not of the project itself
PEER_LOCK: Final = ("bench/peers/pyflink/requirements.in", "bench/peers/pyflink/requirements.txt")  # for a separate environment
_COMPOSE_FILES: Final = ("docker-compose.yml", "docker-compose.cluster.yml")
_MISUSE: Final = 2  # exit code of argparse
_ABSENT: Final[tuple[tuple[str, ...], bool]] = ((), False)


class SbomKind(StrEnum):
    """Installed environment that a bill of materials describes, see `KINDS`."""

    RUNTIME = "runtime"
    OPERATIONS = "operations"
    DEV = "dev"


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    app.command("test", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(test)
    app.command("lint")(lint)
    app.command("lock")(lock)
    app.command("sbom", hidden=True)(sbom)
    bench = typer.Typer(no_args_is_help=True, help="Measure this project, and compare it with its peers.")
    bench.command("lifecycle")(bench_lifecycle)
    bench.command("fold")(bench_fold)
    bench.command("ingest")(bench_ingest)
    bench.command("soak")(bench_soak)
    bench.command("expiry")(bench_expiry)
    bench.command("idle")(bench_idle)
    bench.command("starts")(bench_starts)
    bench.command("state")(bench_state)
    bench.command("quality")(bench_quality)
    bench.command("present")(bench_present)
    bench.command("page")(bench_page)
    bench.command("streams")(bench_streams)
    app.add_typer(bench, name="bench")


def _call(command: list[str], stdin: str | None = None) -> int:
    return subprocess.run(command, cwd=ROOT, input=stdin, text=True, check=False).returncode


def test(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Include the extended tests.")] = False,
    long: Annotated[bool, typer.Option("--long", help="Run all tests in their long forms, for hours.")] = False,
    within: Annotated[
        str | None,
        typer.Option(
            help="Time limit, such as 75m: files with extended tests only are left out, and listed, if it is too short."
        ),
    ] = None,
) -> None:
    """Run tests by layer: unit, property, dags, spark, e2e; options go to pytest.

    Name layers first, or a file or test by its path; the default is all layers.
    ``-n`` is the number of parts that run at a time.
    ``fuzz`` decodes a million inputs (--inputs N, --seed N).
    ``mutants`` plants faults in a copy of the sources, which the tests must catch (--only NAME,
    --list).
    """
    if context.args[:1] == ["mutants"]:
        if code := _call([sys.executable, "-P", "-m", "tests.mutants.run", *context.args[1:]]):
            raise (Misuse if code == _MISUSE else FleetError)(
                "some planted faults were not tried or not caught; see above", code="mutants-failed"
            )
        return
    if context.args[:1] == ["fuzz"]:
        if code := _call([sys.executable, "-P", "-m", "tests.fuzz.run", *context.args[1:]]):
            raise (Misuse if code == _MISUSE else FleetError)("fuzzing failed; see its output above", code="fuzz-failed")
        return
    from cli.dev.test_plan import Form, choose
    from cli.dev.test_run import run_tests

    form = Form.LONG if long else Form.ALL if everything else Form.DEFAULT
    if not run_tests(choose(context.args, form, None if within is None else parse_duration_ms(within) / 1000)):
        raise typer.Exit(1)


def lint() -> None:
    """Check style, types, import contracts, and that generated files are up to date.

    Also check that packages and images are pinned, and look up known vulnerabilities of the packages.
    """
    from cli.dev.advisories import check_advisories
    from cli.dev.images import image_faults

    tools = Path(sys.executable).parent
    checks = {
        "ruff": [str(tools / "ruff"), "check", "."],
        "format": [str(tools / "ruff"), "format", "--check", "."],
        "types": [str(tools / "pyright")],
        "imports": [str(tools / "lint-imports"), "--no-cache"],
        "compose": [str(tools / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *_COMPOSE_FILES],
        "generated": [sys.executable, "-P", "-m", "cli.dev.docgen", "--check"],
        # The variable silences a notice of the theme about its successor.
        "site": ["env", "NO_MKDOCS_2_WARNING=1", str(tools / "mkdocs"), "build", "--strict", "--quiet"],
    }
    failed = [name for name, command in checks.items() if not _passes(name, command)]
    typer.echo("== locks")
    if faults := lock_faults():
        typer.echo("\n".join(faults))
        failed.append("locks")
    typer.echo("== images")
    if faults := image_faults():
        typer.echo("\n".join(faults))
        failed.append("images")
    typer.echo("== advisories")
    faults, summary = check_advisories()
    typer.echo("\n".join([*faults, f"== advisories: {summary}"]))
    if faults:
        failed.append("advisories")
    if failed:
        raise FleetError(f"checks failed: {', '.join(failed)}", code="checks-failed")


def _passes(name: str, command: list[str]) -> bool:
    typer.echo(f"== {name}")
    began = time.monotonic()
    code = _call(command)
    typer.echo(f"== {name}: {'passed' if code == 0 else 'FAILED'} in {time.monotonic() - began:.1f} s")
    return code == 0


def lock_faults() -> list[str]:
    """Return the differences of the locks from pyproject.toml, without network access."""
    from packaging.requirements import Requirement  # installed in the dev environment only
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements: list[Requirement] = []
    locked = {kind: read_lock(ROOT / "requirements" / f"{kind}.txt") for kind in KINDS}
    faults: list[str] = []
    for kind in KINDS:
        requirements += [Requirement(text) for text in (project["dependencies"] if kind == "runtime" else extras[kind])]
        required = list(requirements)
        names = {canonicalize_name(one.name) for one in required}
        for one in required:
            versions, _ = locked[kind].get(canonicalize_name(one.name), _ABSENT)
            if not versions or not all(one.specifier.contains(version, prereleases=True) for version in versions):
                faults.append(f'requirements/{kind}.txt must hold "{one}"; got {_joined(versions)}; run: ./fleet lock')
        for name, (_, asked_for) in locked[kind].items():
            if asked_for and name not in names:
                faults.append(f"requirements/{kind}.txt holds {name}, which is no longer required; run: ./fleet lock")
    for smaller, larger in pairwise(KINDS):
        for name, (versions, _) in locked[smaller].items():
            others, _ = locked[larger].get(name, _ABSENT)
            if others != versions:
                got = f"{_joined(versions)} in {smaller}.txt, {_joined(others)} in {larger}.txt"
                faults.append(f"the locks must hold the same {name}; got {got}; run: ./fleet lock")
    return faults


def _joined(versions: tuple[str, ...]) -> str:
    return " and ".join(versions) or "none"


def read_lock(path: Path) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Return the pinned versions of a lock by package name.

    A universal lock may pin two versions of one package, for different versions of Python.

    Returns:
        Versions of each package, and whether pyproject.toml requires the package directly.
    """
    from cli.dev.components import locked_packages

    found: dict[str, tuple[tuple[str, ...], bool]] = {}
    for one in locked_packages(path):
        versions, asked_for = found.get(one.name, _ABSENT)
        found[one.name] = ((*versions, one.version), asked_for or one.direct)
    return found


def lock(
    check: Annotated[bool, typer.Option("--check", help="Only check whether the locks are stale.")] = False,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Use the newest compatible versions.")] = False,
    images: Annotated[bool, typer.Option("--images", help="Only pin the digests of container images, with Docker.")] = False,
) -> None:
    """Compile the lock files: pinned versions and hashes, without index URLs."""
    if images:
        if check or upgrade:
            raise Misuse("--images excludes --check and --upgrade", code="option-conflict")
        from cli.dev.images import pin_images

        typer.echo("\n".join(pin_images()))
        return
    if check:
        if faults := lock_faults():
            raise FleetError("\n".join(faults), code="lock-failed")
        return
    cache = Path(os.environ.get("FLEET_CACHE") or ROOT / ".cache")
    try:
        uv = find_uv(ROOT, cache, pinned=True)
    except EnvironmentFault as fault:
        raise FleetError(str(fault), code="lock-failed") from None
    for kind, sources in LOCKS.items():
        command = [str(uv), "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes"]
        # The locks must not depend on the mirror that this machine uses.
        command += ["--no-emit-index-url", "--no-emit-find-links", "--custom-compile-command", "./fleet lock"]
        command += ["--upgrade"] if upgrade else []
        if _call([*command, *sources, "--output-file", f"requirements/{kind}.txt"], stdin=_STDIN.get(kind)):
            raise FleetError(f"uv cannot compile requirements/{kind}.txt; see its output above", code="lock-failed")
    source, target = PEER_LOCK
    if _call([*command, "--no-annotate", source, "--output-file", target]):
        raise FleetError(f"uv cannot compile {target}; see its output above", code="lock-failed")


def sbom(
    kind: Annotated[SbomKind, typer.Option("--kind", help="Environment: runtime, operations or dev.")] = SbomKind.OPERATIONS,
    output: Annotated[Path | None, typer.Option("--output", help="File to write instead of standard output.")] = None,
) -> None:
    """Print the software bill of materials: components and hashes, in CycloneDX's JSON format."""
    from cli.dev.sbom import sbom as run
    from fleetpulse import __version__

    text = run(kind.value, __version__)
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise FleetError(
            f'cannot write "{output}" ({error.strerror}); name a file in an existing folder', code="sbom-unwritable"
        ) from None


def bench_lifecycle(
    quick: Annotated[bool, typer.Option("--quick", help="This job and the reference only, in five minutes.")] = False,
    small: Annotated[bool, typer.Option("--small", help="All contenders, with a small fleet.")] = False,
    python: Annotated[bool, typer.Option("--python", help="Compare with Python called for each of 100,000 devices.")] = False,
    flat: Annotated[bool, typer.Option("--flat", help="Compare the cost of a message in fleets of all sizes.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    only: Annotated[list[str] | None, typer.Option("--only", help="Only this contender; repeatable.")] = None,
    devices: Annotated[list[int] | None, typer.Option("--devices", min=1, help="Another fleet size; repeatable.")] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Messages per batch, with --flat.")] = None,
    cores: Annotated[
        str | None, typer.Option("--cores", help="This job on these numbers of cores, such as 1,2, and a model of more.")
    ] = None,
) -> None:
    """Compare the lifecycle job with its peers; their results are compared row by row.

    With --cores, compare it with itself on several numbers of cores. --small and one --devices
    apply.
    """
    if cores is not None:
        from bench.lifecycle.cores import bench_cores, cores_plan

        if quick or python or flat or only or rows or len(devices or ()) > 1:
            raise Misuse("--cores takes --small, --json and one --devices only; omit the other options", code="option-conflict")
        bench_cores(cores_plan(cores, devices[0] if devices else None, small=small), json_lines=json_lines)
        return
    from bench.lifecycle.benchmark import bench_lifecycle as run

    plans = {"quick": quick, "small": small, "python": python, "flat": flat}
    chosen = [name for name, is_set in plans.items() if is_set]
    if len(chosen) > 1:
        raise Misuse("--quick, --small, --python and --flat exclude each other", code="option-conflict")
    run((chosen or ["full"])[0], json_lines=json_lines, only=only or (), devices=devices or (), rows=rows)


def bench_fold(json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False) -> None:
    """Measure the fold alone: cost per message of a key group, and of a single device."""
    from bench.fold import bench_fold as run

    run(json_lines=json_lines)


def bench_ingest(
    quick: Annotated[bool, typer.Option("--quick", help="100,000 messages instead of 1,000,000.")] = False,
    messages: Annotated[int | None, typer.Option("--messages", min=1_000, help="Another number of messages.")] = None,
    mapped: Annotated[bool, typer.Option("--mapped", help="Also measure messages that a mapping decodes.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Drain a full queue into typed rows, compared with mosquitto_sub."""
    from bench.ingest import bench_ingest as run

    run(quick=quick, messages=messages, mapped=mapped, json_lines=json_lines)


def bench_soak(
    minutes: Annotated[float | None, typer.Option("--minutes", min=0.1, help="Duration (60).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small fleet, for less than a minute.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Load the lifecycle job evenly for a long time.

    The exit code is 1 if its memory, state or batches grow.
    """
    from bench.soak import bench_soak as run

    run(minutes=minutes, quick=quick, json_lines=json_lines)


def bench_idle(
    before: Annotated[str, typer.Option("--before", help="Commit to compare with.")] = "716d995",
    devices: Annotated[list[int] | None, typer.Option("--devices", min=1, help="Fleet size; repeatable.")] = None,
    settle: Annotated[str, typer.Option("--settle", help="Time from the first verdict to the measurement.")] = "2m",
    window: Annotated[str, typer.Option("--window", help="Length of the measurement.")] = "2m",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Runs of each contender; figures are medians.")] = 1,
    alone: Annotated[bool, typer.Option("--alone", help="Skip the other commit.")] = False,
    streams: Annotated[bool, typer.Option("--streams", help="Measure also with all streams beside the lifecycle.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Measure the steady cost of `fleet up` and its time to the first verdicts.

    The figures are compared with those of an earlier commit.
    """
    from bench.idle import DEVICES
    from bench.idle import bench_idle as run

    run(
        before=before,
        devices=devices or DEVICES,
        settle_s=parse_duration_ms(settle) / 1000,
        window_s=parse_duration_ms(window) / 1000,
        rounds=rounds,
        json_lines=json_lines,
        alone=alone,
        streams=streams,
    )


def bench_starts(
    before: Annotated[str, typer.Option("--before", help="Commit to compare with.")] = "716d995",
    alone: Annotated[bool, typer.Option("--alone", help="Skip the other commit.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Measure starts: of a command, a replay, a snapshot, and a fleet.

    A fleet is measured up to its first verdict.
    """
    from bench.starts import bench_starts as run

    run(before=before, alone=alone, json_lines=json_lines)


def bench_expiry(
    devices: Annotated[int, typer.Option("--devices", min=1, help="Number of devices with the same deadline.")] = 1_000_000,
    jitter: Annotated[str, typer.Option("--jitter", help="Jitter of the second case; the first has none.")] = "10m",
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Time the batches when a whole fleet falls silent, with and without a jitter."""
    from bench.expiry import bench_expiry as run

    run(devices=devices, jitter_ms=parse_duration_ms(jitter), json_lines=json_lines)


def bench_state(
    quick: Annotated[bool, typer.Option("--quick", help="100,000 devices instead of 1,000,000.")] = False,
    recording: Annotated[
        Path | None, typer.Option("--recording", help="Only replay this recording, and backtest it under another policy.")
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Measure size and migration of the state, compared with plain Spark.

    The exit code is 1 if a device takes too many bytes.
    """
    from bench.backtest import bench_backtest
    from bench.state import bench_state as run
    from bench.state import require_few_bytes

    if recording is not None and not recording.is_file():
        raise Misuse(f'there is no recording "{recording}"; name an existing file', code="recording-missing")
    measured = run(quick=quick, report=_print_progress) if recording is None else bench_backtest(recording, _print_progress)
    require_few_bytes(_show_measured(measured, "moving the state", json_lines=json_lines))


def bench_quality(
    quick: Annotated[bool, typer.Option("--quick", help="50,000 messages instead of 1,000,000.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Judge a clean day of messages and check it by all suites of data quality.

    The exit code is 1 if an expectation fails.
    """
    from bench.quality import bench_quality as run

    _show_measured(run(quick=quick, report=_print_progress), "a clean day", json_lines=json_lines)


def bench_present(
    devices: Annotated[int, typer.Option("--devices", min=2_000, help="Number of devices.")] = 1_000_000,
    history: Annotated[
        list[int] | None,
        typer.Option("--history", min=1, max=6, help="Length of history: times 4.5 transitions; repeatable."),
    ] = None,
    unkept: Annotated[bool, typer.Option("--unkept", help="Also measure before maintenance has kept the facts.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Measure `status`, `devices` and `device` over a large fleet, for several lengths of history."""
    from bench.page.present import bench_present as run

    measured = run(devices, history or [1, 4], _print_progress, unkept=unkept)
    _show_measured(measured, "reading the present", json_lines=json_lines)


def bench_page(
    devices: Annotated[int, typer.Option("--devices", min=2_000, help="Number of devices.")] = 1_000_000,
    history: Annotated[
        list[int] | None,
        typer.Option("--history", min=1, max=30, help="Length of history: times 4.5 transitions; repeatable."),
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=3_650, help="Days that the history covers.")] = 30,
    viewers: Annotated[int, typer.Option("--viewers", min=1, max=100, help="Number of viewers.")] = 10,
    for_s: Annotated[float, typer.Option("--for", min=5, help="Duration of the load, seconds.")] = 120.0,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Measure the page and the API of a large fleet: latency by route, memory, and CPU while nobody looks."""
    from bench.page.page import bench_page as run

    measured = run(devices, history or [1, 4], days, viewers, for_s, _print_progress)
    _show_measured(measured, "page and API", json_lines=json_lines)


def bench_streams(
    devices: Annotated[int, typer.Option("--devices", min=100, help="Number of devices.")] = 100_000,
    minutes: Annotated[int, typer.Option("--minutes", min=10, help="Length of bronze; a device sends a message a minute.")] = 20,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of measured rounds.")] = 3,
    only: Annotated[list[StreamName] | None, typer.Option("--only", help="Stream to measure; repeatable.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Measure the streams beside the lifecycle against plain Spark: CPU a message of each."""
    from bench.streams import bench_streams as run

    measured = run(devices, minutes, rounds, only or (), _print_progress)
    _show_measured(measured, "streams beside the lifecycle", json_lines=json_lines)


def _print_progress(line: str) -> None:
    typer.echo(line, err=True)


def _show_measured(measured: Iterable[dict[str, Any]], title: str, *, json_lines: bool) -> list[dict[str, Any]]:
    from cli.common.output import as_json, as_table, console

    rows = list(measured)
    if json_lines:
        as_json(rows)
    else:
        console().print(as_table(rows, list(dict.fromkeys(name for row in rows for name in row)), title))
    return rows
