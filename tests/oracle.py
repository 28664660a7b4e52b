"""A second witness of what a verdict is: slow, row by row, from the text of the semantics and not from the core.

Rule 1: it imports nothing of ours but `oracle_world`, of which the same is true, and takes plain rows; every fact is worked out
anew from the rows that came before it.
Rule 2: where the text leaves a choice, the choice is named here.
- Of deadlines at one instant silence acts first, then death, a gateway's death, ``until``, recovered, hold over, forget.
- A gap is there while any bridge says so. A bridge that said so says nothing by saying it again.
- A life begins with a registration or a signal; a death of nobody is nothing. What was forgotten is unknown.
- A signal counts for its event time, but for no instant after it was received; where its clock is at fault, or it came late
  and proves life, for the instant at which it was received. The error, boot and counter of a late one do not count.
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
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from tests.oracle_world import Listening, Message, World

KINDS = ("heartbeat", "telemetry", "error", "birth", "death", "control", "registry", "policy", "gap", "tick", "correct")
SIGNALS = KINDS[:4]
FAULTS = ("invalid", "ahead", "behind")
PRESENT = ("online", "degraded", "flagged")
HELD = ("updating", "maintenance")
DAY = 86_400_000
ENDS = {"degraded": ("recovered",), "flagged": ("hold_over", "release"), "hold": ("until",)}  # facts, and what ends them


class Heard(NamedTuple):
    """A signal that a life has heard: its instant, the mode found, class and own limits, since when in service, excused time."""

    at: int
    found: str
    whose: tuple[str, dict[str, int]]
    since: int
    excused: int


@dataclass
class Life:
    """One life of a device: the rows that were judged and the deadlines that acted, in order; all else follows from them."""

    world: World
    device_id: str
    born: int
    since: int  # since when it is in service
    now: int  # the instant of what acts
    log: list[Message] = field(default_factory=list)
    before: list[Message] = field(default_factory=list)  # the log until it was registered again
    told: list[tuple[Any, ...]] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=list)
    clocks: list[str] = field(
        default_factory=lambda: ["on_time"]
    )  # the trust of each signal, after that of a clock that is right
    unsaid: int = 0  # of `told`: transitions of the amended history, from which the device goes on
    numbered: int = 0  # transitions of this life that were judged before that
    conflicts: list[int] = field(
        default_factory=list[int]
    )  # instants of reported identity conflicts, since it was registered anew

    @property
    def mode(self) -> str:
        return self.told[-1][5] if self.told else "provisioned"

    def device_class(self, before: int | None = None) -> str:
        return ["default", *(one.content.get("class") or "default" for one in self.log[:before] if one.kind == "registry")][-1]

    def whose(self, before: int | None = None) -> tuple[str, dict[str, int]]:
        """Return its class, and the limits that it has of its own."""
        entries = [{}, *(one.content for one in self.log[:before] if one.kind == "registry")]
        own = {name: entries[-1][name] for name in ("timeout_ms", "death_grace_ms") if entries[-1].get(name) is not None}
        return self.device_class(before), own

    def rules(self, index: int) -> dict[str, Any]:
        return self.world.rules(self.log[index].at, *self.whose(index))

    def places(self, index: int) -> list[tuple[str, int]]:
        """Return the sites that it has spoken from, before the row at ``index``, each with when it began to; its own first."""
        known = [one for one in self.log[:index] if one.kind in (*SIGNALS, "registry")]
        here, newest = known[0].site if known else "", (-1, -1)
        found = [(here, 0)]
        for one in known:
            if one.kind == "registry" and one.site != here:
                here, found = one.site, [(one.site, 0)]
            if one.kind not in SIGNALS or one.arrival <= newest:
                continue
            newest = one.arrival
            if one.trust != "late" and one.site != found[-1][0]:
                found.append((one.site, one.at))
        return found

    def last_seen(self) -> int | None:
        return max((one.at for one in self.log if one.kind in SIGNALS), default=None)

    def runtime(self) -> int:
        """Return the covered time between signals that follow each other within the timeout, as the later one found it alive."""
        covered, total = self.world.listening.covered, 0
        for one, then in pairwise(self.heard):
            gap = covered(then.at) - covered(one.at) - then.excused
            alive = one.since == then.since and then.found in (*PRESENT, *HELD, "unreachable")
            total += gap if alive and gap <= self.world.rules(then.at, *then.whose)["timeout_ms"] else 0
        return total

    def gateway(self, index: int) -> str | None:
        """Return the gateway that signals and the registry have named before the row at ``index``."""
        rows = [one for one in [*self.before, *self.log[:index]] if one.kind in (*SIGNALS, "registry") and one.trust != "late"]
        named = [one.gateway if one.kind in SIGNALS else one.content.get("gateway") for one in rows]
        return [None, *(one for one in named if one)][-1]

    def death(self) -> Message | None:
        """Return the will that stands: the device was not heard after it, in arrival order."""
        stands: Message | None = None
        for index, one in enumerate(self.log):
            if one.kind in SIGNALS and stands and one.arrival > stands.arrival and (_is_proof(one) or one.at > stands.at):
                stands = None
            if one.kind != "death":
                continue
            if self.is_of_this_session(one, index) and not self.was_proved_after(one, index):
                stands = one
        return stands

    def was_proved_after(self, will: Message, index: int) -> bool:
        proofs = [old for old in self.log[:index] if old.kind in SIGNALS and _is_proof(old)]
        return any(old.arrival > will.arrival for old in proofs)

    def cut_off_since(self) -> int | None:
        """Return since when its gateway is dead, as far as this device is concerned."""
        marks = [one for one in self.log if one.kind in (*SIGNALS, "gateway_death", "over", "given_up")]
        return marks[-1].at if marks and marks[-1].kind == "gateway_death" else None

    def excused(self, through: int) -> int:
        """Return the covered time since the last signal that is no silence of the device: its gateway was dead."""
        covered, total, since = self.world.listening.covered, 0, None
        for one in self.log:
            if one.kind in SIGNALS:
                total, since = 0, None
            elif one.kind == "gateway_death":
                since = one.at
            elif one.kind == "over" and since is not None:
                total, since = total + covered(one.at) - covered(since), None
            elif one.kind == "given_up":
                total, since = covered(one.at) - covered(self.last_seen() or self.since), None
        return total if since is None else total + covered(through) - covered(since)

    def is_cut_off(self) -> bool:
        """Whether its gateway is dead, and the grace is over."""
        since, covered = self.cut_off_since(), self.world.listening.covered
        grace = self.world.rules(self.now, *self.whose())["death_grace_ms"]
        return since is not None and covered(self.now) - covered(since) >= grace

    def words(self, index: int, word: str) -> Any:
        """Return boot, session or seq of the device, by the signals judged before the row at ``index``."""
        value, newest = None, (-1, -1)
        for old in self.log[:index]:
            if old.kind in SIGNALS and old.arrival > newest:
                newest = old.arrival
                value = getattr(old, word) if old.trust != "late" and getattr(old, word) is not None else value
        return value

    def has_rebooted(self, row: Message, index: int) -> bool:
        """Whether a signal names another boot or, where none is named, a counter that fell back and did not wrap."""
        before = [old for old in self.log[:index] if old.kind in SIGNALS]
        if row.trust == "late" or any(old.arrival > row.arrival for old in before):
            return False
        if row.site != self.places(index)[-1][0]:
            return False
        boot, seq = self.words(index, "boot"), self.words(index, "seq")
        if row.boot is not None and boot is not None:
            return row.boot != boot
        if row.seq is None or seq is None or row.seq >= seq:
            return False
        return not any(end - 16 <= seq < end and row.seq < 16 for end in (2**8, 2**16, 2**32))

    def is_of_this_session(self, will: Message, index: int) -> bool:
        session, boot = self.words(index, "session"), self.words(index, "boot")
        if session is not None and will.session is not None:
            return session == will.session
        return boot is None or will.boot in (None, boot)

    def is_newest(self, row: Message, index: int) -> bool:
        return row.trust != "late" and not any(old.arrival > row.arrival for old in self.log[:index] if old.kind in SIGNALS)

    def is_updated(self, row: Message, index: int) -> bool:
        """Whether a signal names another firmware than the device had."""
        return (
            self.is_newest(row, index)
            and None not in (before := self.words(index, "firmware"), row.firmware)
            and (row.firmware != before)
        )

    def is_in_conflict(self, row: Message, index: int) -> bool:
        """Whether a signal reports that one id speaks from two sites in turn."""
        (site, since), before = (places := self.places(index))[-1], [place for place, _ in places[-2:-1]]
        is_back = self.is_newest(row, index) and row.site != site and row.site in before and row.at - since < DAY
        return is_back and not any(row.at - one < DAY for one in self.conflicts)

    def has_no_data(self, row: Message) -> bool:
        """Whether an error does not count: it came late, or is a copy of what has no place of its own."""
        placeless = row.trust not in ("on_time", "late") or row.at != row.event_time
        seq, boot = self.words(len(self.log), "seq"), self.words(len(self.log), "boot")
        return row.trust == "late" or (placeless and row.seq is not None and row.seq == seq and row.boot in (None, boot))

    def errors(self, through: int) -> list[int]:
        return [index for index, one in enumerate(self.log[: through + 1]) if one.kind == "error"]

    def too_many(self, index: int) -> int | None:
        """Return until when the error at ``index`` degrades the device; None where it does not."""
        errors = self.errors(index)

        def remembered(one: int, at: int) -> bool:
            """Whether the error ``one`` was among the newest, and within the window, at the error ``at``."""
            rules, since = self.rules(at), [error for error in errors if one <= error <= at]
            return len(since) <= rules["degraded_errors"] and self.log[at].at - self.log[one].at <= rules["degraded_window_ms"]

        counted = [one for one in errors if all(remembered(one, at) for at in errors if at >= one)]
        enough = len(counted) == self.rules(index)["degraded_errors"]
        return self.log[counted[0]].at + self.rules(index)["degraded_window_ms"] if enough else None

    def completes(self, index: int) -> int | None:
        """Return until when the error at ``index`` flags the device: from some start on, it takes the last step in time."""
        rules, released = self.rules(index), max((one for one, row in enumerate(self.log) if row.kind == "release"), default=-1)
        errors = [one for one in self.errors(index) if one > released]
        others = [one for one in errors if self.rules(one)["flagged_codes"] != rules["flagged_codes"]]
        for start in (one for one in errors if one > max(others, default=-1)):
            steps = list(rules["flagged_codes"])
            for one in (one for one in errors if one >= start):
                in_time = self.log[one].at - self.log[start].at <= self.rules(one)["flagged_window_ms"]
                if in_time and (self.log[one].code or "unknown") == steps[0] and (len(steps) > 1 or one == index):
                    steps.pop(0)
            if not steps:
                return self.log[index].at + rules["flagged_hold_ms"]
        return None

    def until(self, fact: str) -> int | None:
        """Return until when a fact stands; None where it has ended, or never began."""
        notes = [one for one in self.log if one.kind in (fact, *ENDS[fact])]
        return notes[-1].at if notes and notes[-1].kind == fact else None

    def live(self) -> str:
        """Return the mode of a device that is not silent: as the facts give it."""
        facts = [fact for fact in ("flagged", "degraded") if self.until(fact) is not None]
        return "provisioned" if self.last_seen() is None else [*facts, "online"][0]

    def go(self, mode: str, trigger: str) -> None:
        if mode != self.mode:
            number = self.numbered + len(self.told) - self.unsaid + 1
            ids, change = (self.device_id, self.born, number), (self.mode, mode, trigger)
            self.told.append(("transition", *ids, *change, self.now, self.last_seen(), self.runtime()))
            if mode in ("offline", "decommissioned"):
                self.note("over", self.now)

    def next_deadline(self) -> tuple[int, int, str] | None:
        """Return the earliest deadline: instant, its place among those of that instant, trigger."""
        mode, held, due = self.mode, self.until("hold") if self.mode in HELD else None, list[tuple[int | None, int, str]]()

        def over(since: int, limit: str, clock: Listening = self.world.listening, excused: int = 0) -> int | None:
            return self.world.over(clock, since, limit, self.whose(), max(self.now, held or 0), excused)

        quiet_since, death, cut_off = self.last_seen() or self.since, self.death(), self.cut_off_since()
        if mode in (*PRESENT, *HELD, "provisioned", "unreachable"):
            silent = over(quiet_since, "timeout_ms", excused=self.excused(self.now))
            due.append((silent if cut_off is None else over(cut_off, "gateway_outage_limit_ms"), 0, "silence"))
        if mode in (*PRESENT, *HELD, "unreachable") and death is not None:
            due.append((over(death.at, "death_grace_ms"), 1, "death"))
        if mode in PRESENT and cut_off is not None:
            due.append((over(cut_off, "death_grace_ms"), 2, "gateway_death"))
        due += [(held, 3, "until"), (self.until("degraded"), 4, "recovered"), (self.until("flagged"), 5, "hold_over")]
        if mode == "offline":
            due.append((over(quiet_since, "forget_after_ms", excused=self.excused(self.now)), 6, "forget"))
        if mode == "decommissioned":
            since = [change[7] for change in self.told if change[6] != "amended"][-1]
            due = [(over(since, "forget_after_ms", Listening(0)), 6, "forget")]
        return min(((at, place, trigger) for at, place, trigger in due if at is not None), default=None)

    def expire(self, before: int) -> None:
        """Let deadlines act, one after the other, as long as they lie before ``before``."""
        while self.mode != "forgotten" and (due := self.next_deadline()) and due[0] < before:
            self.now, _, trigger = due
            if trigger in ("silence", "death", "gateway_death", "forget"):
                if trigger == "silence" and self.cut_off_since() is not None:
                    self.note("given_up", self.now)
                self.go({"forget": "forgotten", "gateway_death": "unreachable"}.get(trigger, "offline"), trigger)
                continue
            if trigger == "until" and self.last_seen() is not None and self.is_cut_off():
                self.note(trigger, self.now)
                self.go("unreachable", trigger)
                continue
            self.note(trigger, self.now)
            if trigger == "until" or self.mode == {"recovered": "degraded", "hold_over": "flagged"}[trigger]:
                self.go(self.live(), trigger)

    def note(self, what: str, at: int) -> None:
        """Put down a fact with its end, or what ends it."""
        self.log.append(Message(self.now, what, self.device_id, at, own_clock=False))

    def judge(self, row: Message) -> str | None:
        """Let one row act; return what is said of it where it cannot."""
        self.now = row.at
        if row.kind.startswith("gateway_"):
            return self.of_gateway(row)
        if row.kind == "registry":
            return self.registry(row)
        if self.mode == "decommissioned":
            return {"control": "refused", "death": None}.get(row.kind, "after_decommission")
        if row.kind == "control":
            return self.control(row)
        index, excused = len(self.log), self.excused(row.at)
        rebooted = row.kind in SIGNALS and (self.has_rebooted(row, index) or self.is_updated(row, index))
        if row.kind in SIGNALS and self.is_in_conflict(row, index):
            self.conflicts.append(row.at)
        if row.kind == "error" and self.has_no_data(row):
            row = replace(row, kind="heartbeat")
        self.log.append(row)
        if row.kind in SIGNALS:
            self.heard.append(Heard(row.at, self.mode, self.whose(), self.since, excused))
            self.clocks.append(row.trust)
        if row.kind in SIGNALS and self.mode in ("provisioned", "offline", "unreachable") and self.death() is None:
            self.go(self.live(), "signal")
        if rebooted and self.mode == "updating":
            self.go(self.live(), "updated")
        if row.kind == "error" and (until := self.too_many(index)) is not None:
            self.note("degraded", until)
            self.go("degraded" if self.mode == "online" else self.mode, "errors")
        if row.kind == "error" and (until := self.completes(index)) is not None:
            self.note("flagged", until)
            self.go("flagged" if self.mode in PRESENT else self.mode, "sequence")
        return None

    def registry(self, row: Message) -> None:
        if row.content["op"] == "decommission":
            self.go("decommissioned", "decommission")
            return
        if self.mode == "decommissioned":
            self.before, self.log, self.since, self.conflicts = [*self.before, *self.log], [], row.at, []
            self.clocks.append("on_time")
            self.go("provisioned", "registered")
        behind = self.gateway(len(self.log))
        self.log.append(row)
        if self.cut_off_since() is not None and self.gateway(len(self.log)) != behind:
            self.note("over", row.at)
            self.go(self.live() if self.mode == "unreachable" else self.mode, "registered")

    def of_gateway(self, row: Message) -> None:
        index = len(self.log)
        if self.device_id == row.device_id or row.device_id != self.gateway(index):
            return
        if row.kind == "gateway_return" and self.cut_off_since() is not None:
            self.note("over", row.at)
            self.go(self.live() if self.mode == "unreachable" else self.mode, "gateway_return")
        stays = self.mode in ("offline", "decommissioned") or self.cut_off_since() is not None
        if row.kind == "gateway_death" and not stays and not self.was_proved_after(row, index):
            self.log.append(row)

    def control(self, row: Message) -> str | None:
        operation = row.content["op"]
        if operation == "release":
            if self.mode != "updating" and self.until("flagged") is None:
                return "refused"
            self.note("release", row.at)
            if self.mode in ("flagged", "updating"):
                cut_off = self.mode == "updating" and self.last_seen() is not None and self.is_cut_off()
                self.go("unreachable" if cut_off else self.live(), "released")
            return None
        if not row.at < row.content["until"] <= row.at + self.world.rules(row.at, *self.whose())["longest_hold_ms"]:
            return "refused"
        self.note("hold", row.content["until"])
        self.go("maintenance" if operation == "maintain" else "updating", operation)
        return None


def _about(verdict: str, row: Message, late_by: int | None = None) -> tuple[Any, ...]:
    return (verdict, row.device_id, row.kind, row.event_time, row.received_at, late_by)


def _is_proof(signal: Message) -> bool:
    """Whether a signal proves, whatever its clock, that its device lived when it was received."""
    return signal.is_direct or signal.kind == "birth"


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
    world = World(Listening(read[0].received_at), [(-1, -1, built_in)])
    frontier: int | None = None
    judgements, waiting, belated = list[tuple[Any, ...]](), list[Message](), list[Message]()
    for row in read:
        if row.kind == "gap":
            world.listening.read(row, frontier)  # before it moves the frontier
        reach = world.listening.greatest(world.listening.covered(row.received_at) - lateness)
        frontier = max((one for one in (frontier, reach) if one is not None), default=None)
        if row.kind in ("gap", "tick"):
            continue
        if row.kind in SIGNALS:
            trust = _trust(row, frontier, lead, backlog)
            waiting.append(_present(row, trust))
            if trust == "late":
                judgements.append(_about("late", row, (frontier or 0) - (row.event_time or 0)))
                belated.append(_present(row, "on_time"))
        elif frontier is not None and row.at <= frontier:
            judgements.append(_about("refused", row))
            belated += [row] if row.kind == "registry" else []
        elif row.kind == "policy":
            world.policies.append((row.at, row.received_at, row.content["policy"]))
        else:
            waiting.append(row)
    due = [row for row in waiting if frontier is not None and row.at <= frontier]
    events = [row for row in _gateway_events(read, lateness) if frontier is not None and row.at <= frontier]
    for device_id in sorted({row.device_id for row in due}):
        its = [row for row in due if row.device_id == device_id]
        others = [row for row in events if row.device_id != device_id]
        judgements += _judge_device(its, others, world, frontier or 0, [row for row in belated if row.device_id == device_id])
    return judgements


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
            if was_dead and (_is_proof(row) or sent > dead[name]):
                dead.pop(name)
                events.append(replace(row, kind="gateway_return", presence=row.received_at))
            late = row.own_clock and row.event_time is not None and row.received_at - sent >= lateness
            if not late and (itself or was_dead or sessions.get(name) or boots.get(name)):
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
    rows: list[Message], events: list[Message], world: World, frontier: int, belated: list[Message]
) -> list[tuple[Any, ...]]:
    """Judge the messages of one device in their order, deadlines between them, and after the last up to the frontier.

    ``events`` are deaths and returns of gateways, be it its own or not; ``belated`` are its messages that came when their time
    was judged.
    """
    lives, judgements = _lives(rows, events, world, frontier, belated)
    return judgements + [change for life in lives for change in life.told[life.unsaid :]]


def _lives(
    rows: list[Message], events: list[Message], world: World, through: int, belated: list[Message]
) -> tuple[list[Life], list[tuple[Any, ...]]]:
    """Return the lives of a device through an instant, and the judgements on rows that change nothing."""
    first: dict[tuple[Any, ...], Message] = {}
    for row in sorted(rows, key=lambda row: row.arrival):  # as they were received
        place = (row.kind, row.event_time, row.at, row.boot, row.seq, row.digest if row.seq is None else None)
        first.setdefault(place, row)
    counted = list(first.values())
    judgements = [_about("duplicate", row) for row in rows if row.trust != "late" and not any(row is one for one in counted)]
    lives: list[Life] = []
    others = [(row.at, True, row.arrival, row) for row in events]
    for *_, row in sorted([*others, *((row.at, False, _place(row), row) for row in counted)], key=lambda one: one[:3]):
        if lives:
            lives[-1].expire(row.at)
        if row.trust == "late" and not _proves_alive(row, lives, world):
            continue
        if row.kind == "correct":
            known = [one for one in [*rows, *belated] if one.received_at < row.received_at and one.at < row.at]
            known = [one for one in known if one.kind != "correct"]
            amended = _lives(known, [one for one in events if one.at < row.at], world, row.at - 1, [])[0] if known else []
            _correct(lives, amended, row)
            continue
        if not lives or lives[-1].mode == "forgotten":
            admitted = row.kind in SIGNALS and world.policy(row.at)["unknown_devices"] == "admit"
            if not admitted and not (row.kind == "registry" and row.content["op"] == "add"):
                listed = "unknown_device" if row.kind in SIGNALS else "refused"
                silent = row.kind == "death" or row.kind.startswith("gateway_") or row.trust == "late"
                judgements += [] if silent else [_about(listed, row)]
                continue
            lives.append(Life(world, row.device_id, born=row.at, since=row.at, now=row.at))
        conflicts = len(lives[-1].conflicts) if row.kind in SIGNALS else 0
        verdict, clock = lives[-1].judge(row), lives[-1].clocks[-2:]
        judgements += [_about("identity_conflict", row)] if row.kind in SIGNALS and len(lives[-1].conflicts) > conflicts else []
        judgements += [_about(verdict, row)] if verdict and row.trust != "late" else []
        heard = row.kind in SIGNALS and verdict is None
        judgements += [_about("clock", row)] if heard and clock[-1] != clock[0] and clock[-1] in FAULTS else []
    if lives:
        lives[-1].expire(through + 1)
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
