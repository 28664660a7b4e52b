"""Test oracle: a slow, independent implementation of the documented semantics.

Rule 1: it imports only `device_life` and `world` from this project, which import nothing else of
it. It reads plain rows, and computes every fact anew from the earlier rows.
Rule 2: this list names each choice that the documented semantics leaves open.

Times and frontiers:

- Deadlines at one instant fire in this order: silence, death, a gateway's death, ``until``,
  recovered, hold over, session over, forget.
- A site has a gap while any bridge has an open gap that concerns the site. Opening an open gap
  again has no effect.
- Rows of a device are judged in the order in which they become due: first by the ``received_at``
  that moves the frontier of their site to them, then by presence time. A row from another site than
  the device's current one takes effect after everything judged at the device's site by then. No row
  takes effect before the device's newest fact. Neither limit applies to a forgotten device.
- Covered time of a device is, at each instant, that of its current site. A gateway's death or
  return affects a device once the frontier of the device's site reaches it.
- Copies that become due at one instant count once.
- Limits of a single device hold from the registry entry that sets them until the next entry, as its
  class does.

Signals and wills:

- A life starts with a registration or a signal. A will without a life has no effect. A forgotten
  device is unknown.
- A signal takes effect at its event time or its receipt, whichever is earlier. If its clock is at
  fault, or if it is late and proves life, it takes effect at its receipt. Error, boot and counter
  of a late signal do not count.
- A late birth that the device delivered itself sets session and boot. It sets the counter if it
  names a boot, and the device has that boot, or no counter. Other fields of late signals do not
  count.
- The values of boot, session and counter that were received last count. The values of a signal that
  was received before an already judged signal do not count, unless the former is a birth that is not
  late and has a greater counter of the same boot.
- A signal of the same boot with a lesser counter was sent earlier, unless its event time is later
  than that of the newest signal, at the current offset of the device's clock. It counts as heard;
  neither its clock nor its other fields count.
- A signal is a copy if its presence time differs from its event time, and it repeats the counter of
  the previous signal.
- The newest of several wills counts. Its grace period is evaluated like the timeout: at each
  instant, by the policy and class then in force.
- A signal that is judged after a will, but was received before it, does not void the will.
- The current site of a device is that of its newest signal that was not late, since its last
  registration (anew, or at another site). Before such a signal, it is the registered site.
- A signal from the previous site, less than a day after the last move, is an identity conflict,
  unless one was reported within a day. A signal from another site than the previous signal is no
  reboot.

Gateways:

- A gateway is dead from a will that names it as its own gateway and belongs to its newest session,
  until its next signal in arrival order. Signals that are not late set the newest session, once the
  device has named itself as its own gateway or died as one. A signal of the same boot with a lesser
  counter than the one that first named the newest session and boot, and with no later event time,
  sets neither.
- From the death on, silence of the devices behind the gateway does not count, until they are heard,
  the gateway returns, or the registry assigns another gateway. The death does not affect devices
  behind those devices, offline devices, and devices heard after the death. At one instant, a
  device's own rows are judged first.
- A device that is online, degraded or flagged at the end of the grace period becomes unreachable,
  and so does a device whose hold ends later. If the outage limit takes it offline, the time until it is
  forgotten starts there.

Facts and lives:

- An error is judged by the rules in force at its instant, and so are the earlier errors that count
  with it. An earlier error counts if it was among the newest k and within the window at every error
  since. A step of a sequence counts if it was in time when it was taken.
- A control row can name an error. It counts like an error of the device at its instant, but is no signal.
- A command to a device has no effect. The answer of the device is a signal without further effect.
- A release restarts a sequence, and so does an error that was judged under another sequence.
- A session goes on at a signal if the span of event time since the signal before is within the limit in
  force at the later one, the device is not offline, and the signal is no birth that names another session
  or boot than was known before. Of the events of a session, each k-th one flags for review, and a release
  counts anew. Late signals and copies are no events, but they continue a session.
- A flag for review has no effect while the device is flagged by a sequence, or its flag is confirmed. A
  sequence turns a flag for review into one of its own, which ends no earlier. A flag for review ends at the
  first instant at which the device was idle longer than a session allows, by the policy and class then in
  force, in whatever mode it is.
- After a correcting row, the device continues as if no message received before that row had been
  late. A correction that was computed for an older state of the device is refused. That depends on
  the content of the row, and is not tested here.
- Runtime counts between two signals of one period in service, by the policy and class at the later
  one. The later signal must find the device online, degraded, flagged, unreachable or held. A
  pending will has no influence. A correction continues with the runtime of the amended history.
- Registering a decommissioned device again clears its facts and continues its life. The time until
  a decommissioned device is forgotten is event time, not covered time.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

from tests.support.oracle.device_life import FAULTS, KINDS, SIGNALS, Life, compare_counters, is_proof
from tests.support.oracle.world import Listening, Message, Scope, World


def _about(verdict: str, row: Message, late_by: int | None = None) -> tuple[Any, ...]:
    return (verdict, row.device_id, row.kind, row.event_time, row.received_at, late_by)


def _trust(row: Message, frontier: int | None, lead: int, backlog: int) -> str:
    if row.event_time is None:
        return "invalid"
    if row.own_clock and row.event_time > row.received_at + lead:
        return "ahead"
    if row.own_clock and row.event_time < row.received_at - backlog:
        return "behind"
    return "late" if frontier is not None and row.event_time <= frontier else "on_time"


def _present(row: Message, trust: str) -> Message:
    on_time = trust == "on_time" and row.event_time is not None
    presence = min(row.event_time or 0, row.received_at) if on_time else row.received_at
    return replace(row, trust=trust, presence=presence)


def judge(rows: Iterable[Message], lateness: int, lead: int, backlog: int, built_in: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Judge rows, given in any order, up to their frontier.

    Args:
        rows: all rows of a history.
        lateness: allowed lateness, in milliseconds.
        lead: maximum lead of a device's clock, in milliseconds.
        backlog: maximum age of a message, in milliseconds.
        built_in: policy in force before any other.

    Returns:
        Judgements in no particular order. A transition is ("transition", device_id, life,
        transition_no, from_mode, to_mode, trigger, event_time, last_seen, runtime). Any other
        judgement is (judgement, device_id, kind, event_time, received_at, late_by).
    """
    read = sorted(rows, key=lambda row: (row.received_at, row.kind != "gap", row.code or "", row.digest))
    named = {site for row in read if row.kind == "gap" for name in ("sites", "except") for site in row.content.get(name, ())}
    sites = sorted({row.site for row in read} | named | {""})
    world = World({site: Listening(read[0].received_at) for site in sites}, [(-1, -1, built_in)])
    frontiers = dict[str, int | None].fromkeys(sites)
    judgements, waiting, belated = list[tuple[Any, ...]](), list[Message](), list[Message]()
    due, events, steps = list[Due](), gateway_events(read, lateness), list[Step]()
    heard = deepcopy(world.listenings)
    for row in read:
        if row.kind == "gap":
            for site in sites:
                if row.content["op"] == "close" or Scope(row).concerns(site):
                    world.listenings[site].read(row, frontiers[site])  # before the frontier moves
            heard = deepcopy(world.listenings)
        before = dict(frontiers)
        for site, clock in world.listenings.items():
            reach = clock.greatest(clock.covered(row.received_at) - lateness)
            frontiers[site] = max((one for one in (before[site], reach) if one is not None), default=None)
        steps.append(Step(heard, before, dict(frontiers)))
        due += _become_due(waiting, events, steps[-1], lateness, several=bool(named))
        waiting = [one for one in waiting if not any(one is known.row for known in due)] if due else waiting
        frontier = frontiers[row.site]
        if row.kind in ("gap", "tick"):
            continue
        if row.kind in SIGNALS:
            trust = _trust(row, frontier, lead, backlog)
            waiting.append(_present(row, trust))
            if trust == "late":
                judgements.append(_about("late", row, (frontier or 0) - (row.event_time or 0)))
                belated.append(_present(row, "on_time"))
        elif (reached := _greatest(frontiers) if row.kind == "policy" else frontier) is not None and row.at <= reached:
            judgements.append(_about("refused", row))
            belated += [row] if row.kind == "registry" else []
        elif row.kind == "policy":
            world.policies.append((row.at, row.received_at, row.content["policy"]))
        else:
            waiting.append(row)
    for device_id in sorted({one.row.device_id for one in due if not one.is_event}):
        its = [one for one in due if one.row.device_id == device_id and not one.is_event]
        others = [one for one in due if one.row.device_id != device_id and one.is_event]
        late = [row for row in belated if row.device_id == device_id]
        belated_ones = [
            one for row in late for step in steps for one in _become_due([row], [], step, lateness, several=bool(named))
        ]
        judgements += _judge_device(its, others, world, frontiers, belated_ones)
    return judgements


def _greatest(frontiers: dict[str, int | None]) -> int | None:
    return max((one for one in frontiers.values() if one is not None), default=None)


class Due(NamedTuple):
    """Row or gateway event that has become due at a site.

    It has the instant at which it became due, and the frontiers of all sites just before that.
    """

    received_at: int
    row: Message
    site: str
    before: dict[str, int | None]

    @property
    def is_event(self) -> bool:
        return self.row.kind.startswith("gateway_")


class Step(NamedTuple):
    """Coverage of each site when one row was read, and frontiers before and after it."""

    listenings: dict[str, Listening]
    before: dict[str, int | None]
    after: dict[str, int | None]


def _become_due(waiting: list[Message], events: list[Message], step: Step, lateness: int, *, several: bool) -> list[Due]:
    """Return the rows and gateway events that become due at a step.

    Args:
        waiting: pending rows.
        events: gateway events.
        step: step, during which frontiers move and coverage does not change.
        lateness: allowed lateness, in milliseconds.
        several: whether any gap concerns only some sites. If not, all sites have one frontier, and
            are treated as one site.
    """
    found, before = list[Due](), step.before
    for row, site in [*((one, one.site) for one in waiting), *((one, site) for one in events for site in before)]:
        reached, begun = step.after[site], before[site]
        if reached is None or row.at > reached or (begun is not None and row.at <= begun):
            continue
        if not several:
            if row.kind.startswith("gateway_") and site:
                continue
            found.append(Due(0, row, "", {}))
            continue
        clock = step.listenings[site]
        received = clock.earliest(clock.covered(row.at) + lateness) or 0
        judged = dict[str, int | None]()
        for other, its in step.listenings.items():
            reach = its.greatest(its.covered(received - 1) - lateness)
            judged[other] = max((one for one in (before[other], reach) if one is not None), default=None)
        found.append(Due(received, row, site, judged))
    return found


def gateway_events(rows: list[Message], lateness: int) -> list[Message]:
    """Return the deaths and returns of gateways, at the instants of their receipt."""
    events = list[Message]()
    dead, sessions, boots = dict[str, int](), dict[str, str | None](), dict[str, str | None]()
    named = dict[str, Message]()  # signals that first named the newest session or boot
    for row in sorted(rows, key=lambda row: row.arrival):
        name, itself = row.device_id, row.gateway == row.device_id
        if row.kind == "death" and itself:
            known, named_by_will = sessions.get(name), row.session
            if None in (known, named_by_will):
                known, named_by_will = boots.get(name), row.boot
            if None in (known, named_by_will) or known == named_by_will:
                dead[name] = row.received_at
                events.append(replace(row, kind="gateway_death", presence=row.received_at))
        if row.kind in SIGNALS:
            sent = row.received_at if row.event_time is None else min(row.event_time, row.received_at)
            was_dead = name in dead
            if was_dead and (is_proof(row) or sent > dead[name]):
                dead.pop(name)
                events.append(replace(row, kind="gateway_return", presence=row.received_at))
            late = row.own_clock and row.event_time is not None and row.received_at - sent >= lateness
            counts = not late or (row.kind == "birth" and row.is_direct)
            if counts and (itself or was_dead or sessions.get(name) or boots.get(name)):
                names, before = (row.session or sessions.get(name), row.boot or boots.get(name)), named.get(name)
                if names == (sessions.get(name), boots.get(name)):
                    continue
                if before and compare_counters(row, boots.get(name), before.seq, before.site, before.event_time) < 0:
                    continue
                (sessions[name], boots[name]), named[name] = names, row
    return events


def _place(row: Message) -> tuple[Any, ...]:
    """Return the sort key of a message among the messages of its device at one instant.

    The digest orders messages without a counter.
    """
    unnumbered = row.seq is None
    return (
        row.at,
        row.kind == "death",
        -1 if unnumbered else row.seq,
        KINDS.index(row.kind),
        row.digest if unnumbered else 0,
        row.boot or "",
        row.arrival,
    )


def _judge_device(
    rows: list[Due], events: list[Due], world: World, through: dict[str, int | None], belated: list[Due]
) -> list[tuple[Any, ...]]:
    """Judge the messages of one device in order, and its deadlines up to the frontier.

    Args:
        rows: due rows of the device.
        events: deaths and returns of all gateways.
        world: coverage and policies.
        through: frontier of each site.
        belated: late messages and late registry rows of the device.
    """
    lives, judgements = _lives(rows, events, world, through, belated)
    return judgements + [change for life in lives for change in life.transitions[life.amended_count :]]


def _lives(
    rows: list[Due], events: list[Due], world: World, through: dict[str, int | None], belated: list[Due]
) -> tuple[list[Life], list[tuple[Any, ...]]]:
    """Return a device's lives up to an instant of each site, and other judgements."""
    first: dict[tuple[Any, ...], Due] = {}
    for due in sorted(rows, key=lambda due: due.row.arrival):  # in the order of receipt
        row = due.row
        place = (row.kind, row.event_time, row.at, row.boot, row.seq, row.digest if row.seq is None else None)
        first.setdefault((*place, due.received_at), due)
    counted = list(first.values())
    copies = [due.row for due in rows if not any(due is one for one in counted)]
    judgements = [_about("duplicate", row) for row in copies if row.trust != "late"]
    lives: list[Life] = []
    others = [((due.received_at, due.row.at, True, due.row.arrival, due.site), due) for due in events]
    rows_of_it = [((due.received_at, due.row.at, False, _place(due.row), due.site), due) for due in counted]
    for _, due in sorted([*others, *rows_of_it], key=lambda one: one[0]):
        row, here = due.row, lives[-1].at(len(lives[-1].log)) if lives else ""
        if due.is_event and due.before and here != due.site:
            continue  # it takes effect at the device's current site
        if lives and due.before and lives[-1].mode != "forgotten" and (not due.is_event or lives[-1].is_behind(row)):
            judged = due.before[here] if here != due.site else None
            at = max(row.at, lives[-1].newest(), 0 if judged is None else judged + 1)
            lives[-1].expire(at)
            row = row if at == row.at or lives[-1].mode == "forgotten" else replace(row, presence=at)
        if lives:
            lives[-1].expire(row.at)
        if row.trust == "late" and not _proves_alive(row, lives, world):
            continue
        if row.kind == "control" and row.content.get("op") == "command":
            continue
        if row.kind == "correct":
            known = [one for one in [*rows, *belated] if one.row.received_at < row.received_at and one.row.at < row.at]
            known = [one for one in known if one.row.kind != "correct"]
            before = [one for one in events if one.row.at < row.at]
            through_it: dict[str, int | None] = dict.fromkeys(through, row.at - 1)
            amended = _lives(known, before, world, through_it, [])[0] if known else []
            _correct(lives, amended, row)
            continue
        if not lives or lives[-1].mode == "forgotten":
            admitted = row.kind in SIGNALS and world.policy(row.at)["unknown_devices"] == "admit"
            if not admitted and not (row.kind == "registry" and row.content["op"] == "add"):
                listed = "unknown_device" if row.kind in SIGNALS else "refused"
                silent = row.kind == "death" or row.kind.startswith("gateway_") or row.trust == "late"
                judgements += [] if silent else [_about(listed, row)]
                continue
            lives.append(Life(world, row.device_id, born=row.at, since=row.at, now=row.at, site=row.site))
        conflicts = len(lives[-1].conflicts) if row.kind in SIGNALS else 0
        verdict, clock = lives[-1].judge(row), lives[-1].clocks[-2:]
        judgements += [_about("identity_conflict", row)] if row.kind in SIGNALS and len(lives[-1].conflicts) > conflicts else []
        judgements += [_about(verdict, row)] if verdict and row.trust != "late" else []
        heard = row.kind in SIGNALS and verdict is None
        judgements += [_about("clock", row)] if heard and clock[-1] != clock[0] and clock[-1] in FAULTS else []
    if lives and (reached := through[lives[-1].at(len(lives[-1].log))]) is not None:
        lives[-1].expire(reached + 1)
    return lives, judgements


def _proves_alive(row: Message, lives: list[Life], world: World) -> bool:
    """Return whether a late signal counts as heard at its receipt."""
    known = lives and lives[-1].mode != "forgotten"
    rule = world.rules(row.at, *(lives[-1].class_and_limits() if known else ("default", {}))).get("late_proves_alive")
    return row.is_direct if rule is None else rule


def _correct(lives: list[Life], amended: list[Life], row: Message) -> None:
    """Replace the state of a device by that of its amended history.

    If the mode differs, emit a transition.
    """
    alive = bool(lives) and lives[-1].mode != "forgotten"
    before = lives[-1].mode if alive else "provisioned"
    if not amended or amended[-1].mode == "forgotten":
        if alive:
            lives[-1].now = row.at
            lives[-1].move_to("forgotten", "amended")
        return
    life = amended[-1]
    numbers = [change[3] for one in lives for change in one.transitions[one.amended_count :] if change[2] == life.born]
    life.amended_count, life.numbered, life.now = len(life.transitions), max(numbers, default=0), row.at
    if life.mode != before:
        ids = (life.device_id, life.born, life.numbered + 1)
        life.transitions.append(("transition", *ids, before, life.mode, "amended", row.at, life.last_seen(), life.runtime()))
    lives.append(life)
