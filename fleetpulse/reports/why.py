"""Why a device is in its mode: the explanation of a transition, with its rows and its judgement.

Rule 1: a report computes no verdict. `core.explanation` asks the definition, with the rows of the device.
Rule 2: if retention has removed rows of the device, the definition starts from the newest snapshot before
the transition. Without such a snapshot, only the row of the transition is shown, and why.
"""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from fleetpulse.core.amendments import effective_transitions
from fleetpulse.core.errors import FleetError
from fleetpulse.core.explanation.explainers import Explanation, RuleInForce, explain
from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.replay import EMPTY_OUTCOME, Outcome
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import STREAM_HEALTH
from fleetpulse.core.times import END_OF_TIME_MS, format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch, query
from fleetpulse.reports.device_judgements import judgements_of, reading_device
from fleetpulse.reports.frontiers import frontier_ms
from fleetpulse.reports.history.replay_origin import StartingPoint, complete_snapshots, removed_below
from fleetpulse.reports.history.time_travel import Moment, life_of
from fleetpulse.reports.judgements import require_known
from fleetpulse.reports.messages import rows_through
from fleetpulse.reports.present.devices import devices
from fleetpulse.reports.present.parts import through
from fleetpulse.reports.upcoming import upcoming

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_ROW: Final = (
    "received_at_ms",
    "kind",
    "device_id",
    "site",
    "event_time_ms",
    "seq",
    "boot",
    "code",
    "firmware",
    "gateway",
    "body",
)
_LATE: Final = 5  # late messages shown beside an amended transition


@dataclass(frozen=True, slots=True)
class _Known:
    """Rows of a device, and the outcome before them; None if no complete rows are retained."""

    rows: list[Row]
    initial: Outcome


def why(
    home: Home, device_id: str, judged_ms: int | None, at_ms: int | None = None, to_mode: str | None = None
) -> dict[str, Any]:
    """Explain the mode of a device.

    Args:
        home: home to read.
        device_id: id of the device.
        judged_ms: ``received_at`` up to which the job has judged; None before the first batch is
            complete.
        at_ms: instant whose mode is explained, epoch milliseconds; None: the present mode.
        to_mode: mode after the transition to explain, of several transitions at the same instant; None, or
            no such transition: the last one.

    Returns:
        ``device_id``, ``mode``, ``since_ms``, ``sentence``; of a transition also ``transition``,
        ``terms``, ``rule``, ``evidence``, ``otherwise``, ``judged`` and ``amendments``; of the present
        mode ``next``; and ``note`` if rows are missing. Absent facts are None or empty.

    Raises:
        FleetError: the device was never registered or heard, or had no mode at the instant.
    """
    reached_ms = frontier_ms(home, judged_ms)
    moment = Moment(END_OF_TIME_MS if at_ms is None else at_ms, judged_to_ms=through(reached_ms))
    with reading_device(home, device_id) as history:
        spans = life_of(history, device_id, moment)
        emitted = judgements_of(history, [device_id])[device_id]
        if not spans or spans[-1]["trigger"] is None:
            return _without_transition(home, device_id, reached_ms, at_ms, spans)
        transition = _chosen([one for one in effective_transitions(emitted) if (one.event_time_ms or 0) <= moment.at_ms], to_mode)
        judged = _judged(home, history, transition)
    assert transition.event_time_ms is not None, "a transition has an instant"
    known = _known(home, device_id, judged_ms, transition.event_time_ms)
    found = None if known is None else _explained(home, known, transition)
    coming = upcoming(home, known.rows, device_id, known.initial) if known and found and at_ms is None else None
    return {
        "device_id": device_id,
        "mode": transition.to_mode,
        "since_ms": transition.event_time_ms,
        "sentence": _own_sentence(transition) if found is None else found.sentence,
        "transition": _shown(transition),
        "terms": [] if found is None else [_plain(asdict(term)) for term in found.terms],
        "rule": None if found is None or found.rule is None else _rule(found.rule),
        "evidence": [] if found is None else [{"role": one.role, **_row(one.row)} for one in found.evidence],
        "otherwise": "" if found is None else found.otherwise,
        "judged": judged,
        "amendments": _amendments(emitted, transition),
        "late": _late(home, device_id, transition) if transition.kind is JudgementKind.ADD else [],
        "next": coming,
        "note": _note(known, found) or _beyond(reached_ms, at_ms),
    }


def _chosen(transitions: list[Judgement], to_mode: str | None) -> Judgement:
    """Return the last transition, or the one at the same instant that leads to a mode."""
    last = transitions[-1]
    same = [one for one in transitions if one.event_time_ms == last.event_time_ms and one.to_mode == to_mode]
    return same[-1] if same else last


def _known(home: Home, device_id: str, judged_ms: int | None, at_ms: int) -> _Known | None:
    """Return the rows that explain a transition: all rows of the device, or those after a snapshot."""
    below = removed_below(home)
    if not below:
        return _Known(rows_through(home, [device_id], judged_ms), EMPTY_OUTCOME)
    if judged_ms is None:
        return None
    earlier = [one for one in complete_snapshots(home, below, judged_ms) if one.frontier_ms < at_ms]
    if not earlier:
        return None
    origin = StartingPoint(max(earlier, key=lambda one: one.newest_ms).taken, below)
    return _Known(origin.rows(home, [device_id], judged_ms), origin.outcome(home, [device_id]))


def _explained(home: Home, known: _Known, transition: Judgement) -> Explanation | None:
    amending = transition.kind is JudgementKind.ADD
    return explain(known.rows, home.deployment(), transition, initial=known.initial, amending=amending)


def _without_transition(
    home: Home, device_id: str, reached_ms: int | None, at_ms: int | None, spans: list[dict[str, Any]]
) -> dict[str, Any]:
    """Explain a mode that no transition began: the registry, the initial list, or no verdict yet."""
    if spans:
        mode, since_ms, sentence = spans[-1]["mode"], spans[-1]["since_ms"], _begun(spans[-1])
    else:
        require_known(home, device_id)
        if at_ms is not None:
            raise FleetError(
                f"device {device_id} had no mode at {format_instant(at_ms)}; see its life with: "
                f"./fleet rewind --to INSTANT --device {shlex.quote(device_id)} --home {shlex.quote(str(home.path))}",
                code="why-without-mode",
            )
        [one] = devices(home, reached_ms, device_id=device_id)
        mode, since_ms, sentence = one["mode"], None, one["reason"]
    nothing: dict[str, Any] = {"transition": None, "rule": None, "judged": None, "next": None}
    empty: dict[str, Any] = {"terms": [], "evidence": [], "amendments": [], "late": [], "otherwise": ""}
    known = {"device_id": device_id, "mode": mode, "since_ms": since_ms, "sentence": sentence, "note": _beyond(reached_ms, at_ms)}
    return {**known, **nothing, **empty}


def _begun(span: Mapping[str, Any]) -> str:
    """Return the reason of a mode with which a life begins."""
    if span["mode"] == Mode.PROVISIONED:
        return "it was registered, and no signal has been judged since"
    return f"{span['reason']}, with this mode"


def _beyond(reached_ms: int | None, at_ms: int | None) -> str:
    if at_ms is None or (reached_ms is not None and at_ms <= reached_ms):
        return ""
    return f"Verdicts are final up to {'no instant yet' if reached_ms is None else format_instant(reached_ms)} only."


def _own_sentence(one: Judgement) -> str:
    last = "" if one.last_seen_ms is None else f"; its last signal counted at {format_instant(one.last_seen_ms)}"
    return f"{one.reason or f'trigger {one.trigger}'}{last}"


def _note(known: _Known | None, found: Explanation | None) -> str:
    if known is None:
        return "Retention has removed messages of this device, and no snapshot before the transition is kept."
    if found is None:
        return "The retained messages do not lead to this transition; it was judged with messages that are no longer kept."
    return ""


def _shown(one: Judgement) -> dict[str, Any]:
    names = (
        "kind",
        "from_mode",
        "to_mode",
        "trigger",
        "event_time_ms",
        "life_ms",
        "transition_no",
        "amendment_no",
        "last_seen_ms",
    )
    return {name: getattr(one, name) for name in names}


def _plain(term: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in term.items() if value is not None}


def _rule(rule: RuleInForce) -> dict[str, Any]:
    dated = rule.dated
    from_start = dated.effective_from_ms <= 0  # the built-in policy, or the first one of a home
    return {
        "key": rule.key,
        "value": rule.value,
        "of": rule.of,
        "policy_version": dated.policy.version,
        "in_force_since_ms": None if from_start else dated.effective_from_ms,
        "policy_received_at_ms": None if dated.received_at_ms < 0 else dated.received_at_ms,
    }


def _row(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _ROW if getattr(row, name) is not None}


def _judged(home: Home, history: "DuckDBPyConnection", one: Judgement) -> dict[str, Any] | None:
    """Return when and by which generation and batch a transition was judged; None if its row is unknown."""
    number = "amendment_no" if one.kind is JudgementKind.ADD else "transition_no"
    found = fetch(
        history,
        f"""SELECT epoch_ms(judged_at) AS judged_at_ms, generation FROM judgements
            WHERE device_id = ? AND kind = ? AND epoch_ms(life) = ? AND {number} = ?""",
        [one.device_id, one.kind.value, one.life_ms, getattr(one, number)],
    )
    if not found:
        return None
    judged_at_ms, generation = found[0]["judged_at_ms"], found[0]["generation"]
    batches = query(
        home,
        """SELECT batch_id FROM stream_health WHERE generation = ? AND epoch_ms(began_at) <= ?
           ORDER BY began_at DESC LIMIT 1""",
        [generation, judged_at_ms],
        tables=[STREAM_HEALTH.name],
    )
    batch = batches[0]["batch_id"] if batches and one.kind is JudgementKind.TRANSITION else None
    return {"judged_at_ms": judged_at_ms, "generation": generation, "batch": batch}


def _amendments(emitted: list[Judgement], transition: Judgement) -> list[dict[str, Any]]:
    """Return the transitions of the same life that amendments retracted or added, oldest first."""
    rows = (one for one in emitted if one.kind is not JudgementKind.TRANSITION and one.life_ms == transition.life_ms)
    ordered = sorted(rows, key=lambda one: one.amendment_no or 0)
    return [{**_shown(one), "reason": one.reason} for one in ordered]


def _late(home: Home, device_id: str, transition: Judgement) -> list[dict[str, Any]]:
    """Return the newest late messages of the device up to a transition, which an amendment counts as on time."""
    return query(
        home,
        f"""SELECT epoch_ms(received_at) AS received_at_ms, epoch_ms(event_time) AS event_time_ms, message_kind, seq, late_by_ms
            FROM judgements WHERE kind = '{JudgementKind.LATE}' AND device_id = ? AND epoch_ms(event_time) <= ?
            ORDER BY event_time DESC LIMIT {_LATE}""",
        [device_id, transition.event_time_ms],
    )
