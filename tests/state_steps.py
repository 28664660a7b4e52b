"""What the verbs that change the state say on their way, read from the code; and who is killed there.

A step is a sentence with ``{}`` where it says a value: as it stands in the code, and as what it matches of a line that was said.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SAYING = (  # the modules whose words a verb of `./fleet state` says
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
OF_OTHERS = frozenset(  # they say what other commands do
    {
        "batch/amend.py",
        "batch/backtest.py",
        "batch/state/drill.py",
        "batch/maintenance/maintain.py",
        "batch/common/progress.py",
        "batch/quality/rejudge.py",
    }
)


def steps_in(path: Path) -> Iterator[str]:
    """Yield the steps that a module says."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or len(node.args) != 1:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("say", "_say", "steps"):
            yield _sentence(node.args[0])


def _sentence(said: ast.expr) -> str:
    if isinstance(said, ast.Constant):
        return str(said.value)
    if isinstance(said, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in said.values)
    return ast.unparse(said)  # worked out elsewhere


def is_said(step: str, line: str) -> bool:
    """Whether a line says a step."""
    return re.fullmatch(".*".join(map(re.escape, step.split("{}"))), line.strip()) is not None


@dataclass(frozen=True, slots=True)
class Call:
    """A verb that is killed at each of its steps, one after another, and given again each time.

    Attributes:
        words: of the command, behind ``./fleet state``; ``{list}`` stands for a file of devices.
        steps: at which, in the order in which they are said.
        again: what it says when it is given once more behind its last step; empty: it finishes.
        before: what is done to the home before each kill, see tests/e2e/test_state_killed_everywhere.py.
    """

    words: tuple[str, ...]
    steps: tuple[str, ...]
    again: str = ""
    before: str = ""


SPARK = "starting Spark"
FINISHING = "finishing what generation {} has begun"
BUILDING = "building generation {}"
SINCE = "judging again what was read since, {} versions of bronze, and saying nothing"
COMPARING = "comparing all devices, and all that waits, with the generation that runs"
LOOKING = "looking at generation {} before it gets the work"
SWITCHED = "generation {} is current; generation {} is kept: ./fleet state rollback goes back"
HELD = "generation {} is made, and held; give it the work: ./fleet state switch {}, or remove it: ./fleet state discard {}"
CHANGED = "generation {}: {} key groups, {} partitions, stored form {}; the next: {} key groups, {} partitions, stored form {}"
READING = "reading generation {} after batch {}"
THERE = "comparing with snapshot version {}, which was taken there"
FROM_SNAPSHOT = "snapshot version {} of generation {} after batch {}: {} of {} devices; bronze is read from version {}"
OTHERS = "generations {} and {} know different devices: they are not compared"
FROM_LIST = "{} devices of {}; bronze is read from version {}"
_NOTHING = "nothing to do"
WAITING = "waiting for {}"  # said where another makes something: the test does

ON_ONE_HOME = (  # one after another; the verdicts are then those of an undisturbed run
    Call(
        ("snapshot",),
        (
            SPARK,
            READING,
            "writing {} devices",
            "snapshot version {} is written",
            THERE,
            "snapshot version {} holds that already: generation {} after batch {}, {} devices; nothing to do",
        ),
    ),
    Call(
        ("migrate", "--form", "4", "--gate"),
        (CHANGED, SPARK, FINISHING, BUILDING, COMPARING, LOOKING, SWITCHED),
        _NOTHING,
        "unfinished",
    ),
    Call(
        ("repartition", "3"),
        (
            "the state has {} partitions, and is to have {}",
            SPARK,
            "copying generation {} to generation {}",
            "repartitioning the copy",
            "comparing all state and all timers with the generation that runs",
            SWITCHED,
        ),
        _NOTHING,
    ),
    Call(("repartition", "5", "--anew"), (CHANGED, SPARK, BUILDING, COMPARING, SWITCHED), _NOTHING),
    Call(("rescale", "--key-groups", "3", "--hold"), (CHANGED, SPARK, BUILDING, COMPARING, HELD), "is held, and there is one"),
    Call(("rescale", "--key-groups", "4"), (CHANGED, SPARK, BUILDING, COMPARING, SWITCHED), _NOTHING, "discarded"),
    Call(
        ("rollback",),
        (
            "generation {} stopped after batch {}: {} key groups, {} partitions, stored form {}; a new generation goes on from "
            "there",
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
            "the state is not read, and nothing is compared; generation {} stopped after batch {}",
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
            "where generation {} stopped is not known: {}; so all since the snapshot is judged again, and of that is said what "
            "is not in judgements; the state is compared with nothing",
            BUILDING,
            SINCE,
            "comparing what follows from the snapshot with what was said since",
            "generation {} is current; generation {} cannot be gone back to: ./fleet state prune removes it",
            "saying what was not said: {} of {} verdicts that follow from the snapshot",
        ),
        before="logs damaged",
    ),
)
ON_ANOTHER = (  # these choose devices, so that other verdicts follow
    Call(("snapshot", "--gate"), ("looking at them before they are published",)),
    Call(
        ("snapshot",),
        (SPARK, READING, THERE, "snapshot version {} is damaged: it {}, and is taken anew"),
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
        "both generations judge the live input for {} s; generation {} says it aside",
        "comparing what both have said",
        "comparing all devices, and all that waits",
        "{} judgements, all the same",
        SWITCHED,
    ),
    _NOTHING,
)
KILLED_AT = frozenset({WAITING, *(step for call in (*ON_ONE_HOME, *ON_ANOTHER, BESIDE_THE_JOB) for step in call.steps)})
HOW_FAR = (
    "canary: bronze is judged up to version {} of {}",
    "finishing it: bronze is judged up to version {} of {}",
    "judging again: bronze up to version {} of {}",
)
ELSEWHERE = {  # steps at which nobody is killed there, and why
    **dict.fromkeys(
        (
            "generation {} stopped after batch {}; generation {} goes on from there",
            "generation {} has the work already",
            "generation {} is removed; generation {} is current as before",
            "generation {} is {}removed",
        ),
        "verbs without Spark are killed before any change of the disk by tests/unit/test_killed_anywhere.py",
    ),
    **dict.fromkeys(
        ("generation {}, made by {}, is to be removed; the one that runs is untouched", "_described(home, form, for_s)"),
        "a dry run changes nothing",
    ),
    **dict.fromkeys(HOW_FAR, "it says how far a step is that somebody is killed at"),
}
