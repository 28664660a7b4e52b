"""A second witness of what a verdict is: slow, row by row, from the text of the semantics and not from the core.

Rule 1: it imports nothing of ours but `oracle_life` and `oracle_world`, of which the same is true, and takes plain rows; every
fact is worked out anew from the rows that came before it.
Rule 2: where the text leaves a choice, the choice is named here.
- Of deadlines at one instant silence acts first, then death, a gateway's death, ``until``, recovered, hold over, forget.
- A gap of a site is there while any bridge has one that concerns the site. A bridge that opens a gap again changes nothing.
- Rows of a device are judged in the order in which they become due: the ``received_at`` that moves the frontier of their site to
  them, then their presence time. A row of another site than the device's counts for an instant after all that was judged of the
  device's site by then, and no row counts before the device's newest fact. A forgotten device has neither.
- Covered time of a device is that of the site from which it speaks at each instant. A gateway's death or return acts on a device
  when the site from which it speaks is judged so far.
- Of a will and a signal that is judged after it, but was received before, the will stands.
- Copies count once if they become due at one instant.
- A life begins with a registration or a signal; a death of nobody is nothing. What was forgotten is unknown.
- A signal counts for its event time, but for no instant after it was received; where its clock is at fault, or it came late
  and proves life, for the instant at which it was received. The error, boot and counter of a late one do not count.
- A late birth that the device delivered itself names its session and boot; other words of late signals do not count.
- Of a device's own words (boot, session, counter) those received last count; a signal that was received before one already judged
  does not. A signal whose presence time is not its event time and that repeats the number of the one before it is a copy.
- Of several wills the newest counts. Its grace is a limit of silence: each instant by the policy and class then in force.
- A gateway is dead from a will that names it as its own gateway, and is of its newest session, until its next signal in arrival
  order. Its newest session is named by signals that were not late, once it has named itself as its own gateway or died as one.
- From the death on the silence of the devices behind it does not count, until they are heard, the gateway returns, or the
  registry puts them behind another. Devices behind those devices are not concerned, nor offline ones, nor those that were heard
  after the death. At one instant a device's own rows come first.
- A device that is present at the end of the grace is unreachable, and so is one whose hold ends later. If the outage limit takes
  it offline, the time until it is forgotten counts from there.
- An error is judged by the rule at its own instant, and so is what is remembered for it: of the errors before, those that
  were among the newest k and within the window at every error since; of a sequence, the steps that were in time when taken.
- A sequence is begun anew by a release, and by an error that came under another sequence.
- A row that corrects says: from here on as if nothing had come late of what was received before this row. What was worked out
  for a device that has moved on since is refused; that takes a look at what the row carries, and is not asked here.
- Runtime is counted between two signals of one service, by the policy and class at the later one, which must find the device in
  time or held; what a will stops is no matter. A correction goes on with the runtime of the amended history.
- Registering a decommissioned device again clears its facts and goes on with its life. Its tombstone counts event time.
- Limits of a device's own hold from the registry's entry that gives them to the next entry, as its class does.
- Where a device speaks from is the site of its newest signal, of those that were not late, since a registration at another site
  or anew: until then its own site. A signal that comes from where it spoke from before the last move, less than a day after it,
  is an identity conflict, unless one was reported within a day. A signal from another site than the one before is no reboot.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

from tests.oracle_life import FAULTS, KINDS, SIGNALS, Life, is_proof
from tests.oracle_world import Listening, Message, Scope, World


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
    """Judge rows, in any order, up to their frontier; ``lateness``, ``lead`` and ``backlog`` are in milliseconds.

    Returns:
        ("transition", device_id, life, transition_no, from_mode, to_mode, trigger, event_time, last_seen, runtime), and of
        every other verdict (verdict, device_id, kind, event_time, received_at, late_by), in no particular order.
    """
    read = sorted(rows, key=lambda row: (row.received_at, row.kind != "gap", row.code or "", row.digest))
    named = {site for row in read if row.kind == "gap" for name in ("sites", "except") for site in row.content.get(name, ())}
    sites = sorted({row.site for row in read} | named | {""})
    world = World({site: Listening(read[0].received_at) for site in sites}, [(-1, -1, built_in)])
    frontiers = dict[str, int | None].fromkeys(sites)
    judgements, waiting, belated = list[tuple[Any, ...]](), list[Message](), list[Message]()
    due, events, steps = list[Due](), _gateway_events(read, lateness), list[Step]()
    heard = deepcopy(world.listenings)
    for row in read:
        if row.kind == "gap":
            for site in sites:
                if row.content["op"] == "close" or Scope(row).concerns(site):
                    world.listenings[site].read(row, frontiers[site])  # before it moves the frontier
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
    """A row that has become due at a site, or a gateway's event: when, and up to where each site was judged just before."""

    received_at: int
    row: Message
    site: str
    before: dict[str, int | None]

    @property
    def is_event(self) -> bool:
        return self.row.kind.startswith("gateway_")


class Step(NamedTuple):
    """One row read: when we had listened to each site by then, and up to where it was judged before and after."""

    listenings: dict[str, Listening]
    before: dict[str, int | None]
    after: dict[str, int | None]


def _become_due(waiting: list[Message], events: list[Message], step: Step, lateness: int, *, several: bool) -> list[Due]:
    """Return what becomes due while the frontiers move, and coverage stays as it is.

    ``several``: whether some gap concerns some sites only; else all sites are judged alike, and are one.
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


def _gateway_events(rows: list[Message], lateness: int) -> list[Message]:
    """Return deaths and returns of gateways, at the instants of their receipt."""
    events = list[Message]()
    dead, sessions, boots = dict[str, int](), dict[str, str | None](), dict[str, str | None]()
    for row in sorted(rows, key=lambda row: row.arrival):
        name, itself = row.device_id, row.gateway == row.device_id
        if row.kind == "death" and itself:
            known, said = sessions.get(name), row.session
            if None in (known, said):
                known, said = boots.get(name), row.boot
            if None in (known, said) or known == said:
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
                sessions[name] = row.session or sessions.get(name)
                boots[name] = row.boot or boots.get(name)
    return events


def _place(row: Message) -> tuple[Any, ...]:
    """Where a message stands among those of its device; the digest is for those without a number."""
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
    """Judge the messages of one device in their order, deadlines between them, and after the last up to the frontier.

    ``events`` are deaths and returns of gateways, be it its own or not; ``belated`` are its messages that came when their time
    was judged.
    """
    lives, judgements = _lives(rows, events, world, through, belated)
    return judgements + [change for life in lives for change in life.told[life.unsaid :]]


def _lives(
    rows: list[Due], events: list[Due], world: World, through: dict[str, int | None], belated: list[Due]
) -> tuple[list[Life], list[tuple[Any, ...]]]:
    """Return the lives of a device through an instant of each site, and the judgements on rows that change nothing."""
    first: dict[tuple[Any, ...], Due] = {}
    for due in sorted(rows, key=lambda due: due.row.arrival):  # as they were received
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
            continue  # it counts where the device speaks from
        if lives and due.before and lives[-1].mode != "forgotten" and (not due.is_event or lives[-1].is_behind(row)):
            judged = due.before[here] if here != due.site else None
            at = max(row.at, lives[-1].newest(), 0 if judged is None else judged + 1)
            lives[-1].expire(at)
            row = row if at == row.at or lives[-1].mode == "forgotten" else replace(row, presence=at)
        if lives:
            lives[-1].expire(row.at)
        if row.trust == "late" and not _proves_alive(row, lives, world):
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
    """Whether a signal that came late counts as heard when it was received."""
    known = lives and lives[-1].mode != "forgotten"
    rule = world.rules(row.at, *(lives[-1].whose() if known else ("default", {}))).get("late_proves_alive")
    return row.is_direct if rule is None else rule


def _correct(lives: list[Life], amended: list[Life], row: Message) -> None:
    """Let a device go on as its amended history does, saying so where its mode is another."""
    alive = bool(lives) and lives[-1].mode != "forgotten"
    before = lives[-1].mode if alive else "provisioned"
    if not amended or amended[-1].mode == "forgotten":
        if alive:
            lives[-1].now = row.at
            lives[-1].go("forgotten", "amended")
        return
    life = amended[-1]
    numbers = [change[3] for one in lives for change in one.told[one.unsaid :] if change[2] == life.born]
    life.unsaid, life.numbered, life.now = len(life.told), max(numbers, default=0), row.at
    if life.mode != before:
        ids = (life.device_id, life.born, life.numbered + 1)
        life.told.append(("transition", *ids, before, life.mode, "amended", row.at, life.last_seen(), life.runtime()))
    lives.append(life)
