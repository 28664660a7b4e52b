"""Progress messages of verbs that change the state, and kills of verbs at them.

A step is a progress message with ``{}`` for each value. Steps are read from the code, and match the
lines that a verb prints.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STEP_MODULES = (  # modules with progress messages of the verbs of `./fleet state`
    "batch/state/canary.py",
    "batch/state/generation.py",
    "batch/state/handoff.py",
    "batch/state/prune.py",
    "batch/state/snapshot.py",
    "batch/state/recover.py",
    "batch/state/operations.py",
    "cli/commands/state/generations.py",
    "cli/commands/state/commands.py",
    "cli/commands/state/session.py",
    "cli/commands/state/canary.py",
    "fleetpulse/io/home/exclusive.py",
)
OTHER_MODULES = frozenset(  # modules with progress messages of other commands
    {
        "batch/amend.py",
        "batch/backtest.py",
        "batch/calibrate.py",
        "batch/state/drill.py",
        "batch/maintenance/maintain.py",
        "batch/common/progress.py",
        "batch/quality/rejudge.py",
    }
)


def steps_in(path: Path) -> Iterator[str]:
    """Yield the steps of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or len(node.args) != 1:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("report", "_report", "steps"):
            yield _sentence(node.args[0])


def _sentence(text: ast.expr) -> str:
    if isinstance(text, ast.Constant):
        return str(text.value)
    if isinstance(text, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in text.values)
    return ast.unparse(text)  # the expression names a computed text


def is_line_of(step: str, line: str) -> bool:
    """Return whether a line matches a step."""
    return re.fullmatch(".*".join(map(re.escape, step.split("{}"))), line.strip()) is not None


@dataclass(frozen=True, slots=True)
class Call:
    """Verb that is killed at each of its steps in turn, and run again after each kill.

    Attributes:
        words: arguments of ``./fleet state``; ``{list}`` stands for a file of devices.
        steps: steps at which the verb is killed, in the order of their output.
        again: error of a further run after the last step; empty if that run succeeds.
        before: change of the home before each kill, see
            tests/e2e/state/test_killed_everywhere.py.
    """

    words: tuple[str, ...]
    steps: tuple[str, ...]
    again: str = ""
    before: str = ""


SPARK = "starting Spark"
FINISHING = "finishing the open batch of generation {}"
BUILDING = "building generation {}"
SINCE = "replaying {} versions of bronze without emitting judgements"
COMPARING = "comparing all devices and pending rows with the running generation"
CHECKING = "checking generation {} before the switch"
SWITCHED = "generation {} is current; generation {} is kept; to return to it: ./fleet state rollback"
HELD = "generation {} is made, and held; activate it: ./fleet state switch {}, or remove it: ./fleet state discard {}"
CHANGED = "generation {}: {} key groups, {} partitions, stored form {}; the next: {} key groups, {} partitions, stored form {}"
READING = "reading generation {} after batch {}"
THERE = "comparing with snapshot version {}, which has the same position"
FROM_SNAPSHOT = "snapshot version {} of generation {} after batch {}: {} of {} devices; bronze is read from version {}"
OTHERS = "generations {} and {} have different devices; they are not compared"
FROM_LIST = "{} devices of {}; bronze is read from version {}"
_NOTHING = "nothing to do"
WAITING = "waiting for {}"  # printed while another process, here the test, holds the same lock

ON_ONE_HOME = (  # in this order; the verdicts afterwards equal those of an undisturbed run
    Call(
        ("snapshot",),
        (
            SPARK,
            READING,
            "writing {} devices",
            "snapshot version {} is written",
            THERE,
            "snapshot version {} is already that of generation {} after batch {}, {} devices; nothing to do",
        ),
    ),
    Call(
        ("migrate", "--form", "4", "--gate"),
        (CHANGED, SPARK, FINISHING, BUILDING, COMPARING, CHECKING, SWITCHED),
        _NOTHING,
        "unfinished",
    ),
    Call(
        ("repartition", "3"),
        (
            "partitions of the state: {} before, {} after",
            SPARK,
            "copying generation {} to generation {}",
            "repartitioning the copy",
            "comparing all state and all timers with the running generation",
            SWITCHED,
        ),
        _NOTHING,
    ),
    Call(("repartition", "5", "--anew"), (CHANGED, SPARK, BUILDING, COMPARING, SWITCHED), _NOTHING),
    Call(("rescale", "--key-groups", "3", "--hold"), (CHANGED, SPARK, BUILDING, COMPARING, HELD), "is held, and only one"),
    Call(("rescale", "--key-groups", "4"), (CHANGED, SPARK, BUILDING, COMPARING, SWITCHED), _NOTHING, "discarded"),
    Call(
        ("rollback",),
        (
            "generation {} stopped after batch {}: {} key groups, {} partitions, stored form {}; a new generation continues "
            "from there",
            SPARK,
            BUILDING,
            COMPARING,
            SWITCHED,
        ),
        _NOTHING,
    ),
    Call(("bootstrap",), (SPARK, FROM_SNAPSHOT, BUILDING, SINCE, COMPARING, SWITCHED)),
    Call(
        ("bootstrap", "--damaged"),
        (
            FROM_SNAPSHOT,
            "the state is neither read nor compared; generation {} stopped after batch {}",
            BUILDING,
            SINCE,
            SWITCHED,
        ),
        before="state damaged",
    ),
    Call(
        ("bootstrap", "--damaged"),
        (
            FROM_SNAPSHOT,
            "the stop position of generation {} is unknown: {}; replaying all messages since the snapshot and emitting only "
            "the missing judgements; state comparison is skipped",
            BUILDING,
            SINCE,
            "comparing the judgements that follow from the snapshot with those emitted since",
            "generation {} is current; generation {} cannot be restored: ./fleet state prune removes it",
            "emitting the missing judgements: {} of {} that follow from the snapshot",
        ),
        before="logs damaged",
    ),
)
ON_ANOTHER = (  # these select devices, so the verdicts afterwards differ
    Call(("snapshot", "--gate"), ("checking the rows before they are published",)),
    Call(
        ("snapshot",),
        (SPARK, READING, THERE, "snapshot version {} is damaged: it {}; taking it again"),
        before="snapshot damaged",
    ),
    Call(("bootstrap", "--only", "device_id <> ''"), (SPARK, FROM_SNAPSHOT, BUILDING, SWITCHED)),
    Call(("bootstrap",), (FROM_SNAPSHOT, OTHERS, BUILDING, SWITCHED)),
    Call(("bootstrap", "--devices", "{list}"), (FROM_LIST, SPARK, BUILDING, SWITCHED)),
    Call(("bootstrap", "--registry"), (FROM_LIST, SPARK, BUILDING, SWITCHED)),
)
BESIDE_THE_JOB = Call(
    ("migrate", "--form", "4", "--canary", "--for", "2s"),
    (
        SPARK,
        BUILDING,
        "both generations judge the live input for {} s; generation {} writes to a scratch table",
        "comparing the judgements of both",
        "comparing all devices and pending rows",
        "{} judgements, all equal",
        SWITCHED,
    ),
    _NOTHING,
)
KILLED_AT = frozenset({WAITING, *(step for call in (*ON_ONE_HOME, *ON_ANOTHER, BESIDE_THE_JOB) for step in call.steps)})
PROGRESS = (
    "canary: bronze is judged up to version {} of {}",
    "finishing: bronze is judged up to version {} of {}",
    "replaying: bronze is judged up to version {} of {}",
)
NOT_KILLED = {  # steps without a kill in those tests, and the reason
    **dict.fromkeys(
        (
            "generation {} stopped after batch {}; generation {} continues from there",
            "generation {} is already current",
            "generation {} is removed; generation {} is still current",
            "generation {} is {}removed",
        ),
        "verbs without Spark are killed before any change of the disk by tests/unit/batch/state/test_killed.py",
    ),
    **dict.fromkeys(
        (
            "generation {}, made by {}, would be removed; the running one is unchanged",
            "_described(home, form, for_s)",
            "describe_dropped(dropped)",
        ),
        "a dry run changes nothing",
    ),
    **dict.fromkeys(PROGRESS, "progress within a step that another test kills"),
}
