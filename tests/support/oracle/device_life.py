"""Life of a device in the test oracle: a log of its rows and deadlines.

Rule: as in `oracle`, whose choices it implements, only `world` is imported from this project.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from tests.support.oracle.world import END, DeviceCoverage, Listening, Message, World

KINDS = ("heartbeat", "telemetry", "error", "birth", "death", "control", "registry", "policy", "gap", "tick", "correct", "ack")
SIGNALS = (*KINDS[:4], "ack")
FAULTS = ("invalid", "ahead", "behind")
PRESENT = ("online", "degraded", "flagged")
HELD = ("updating", "maintenance")
DAY = 86_400_000
ENDS = {"degraded": ("recovered",), "hold": ("until",)}  # facts, and the rows that end them


class Heard(NamedTuple):
    """Signal that was judged in a life.

    Its fields are its instant, the mode before it, class and limits of the device, the start of the
    period in service, and the excused time.
    """

    at: int
    found: str
    whose: tuple[str, dict[str, int]]
    since: int
    excused: int


def compare_counters(row: Message, boot: str | None, seq: int | None, site: str, newest: int | None) -> int:
    """Compare a signal with the newest one of its boot, by their counters.

    Args:
        row: the signal.
        boot, seq, site: those of the newest signal.
        newest: event time of the newest signal; None if it is invalid.

    Returns:
        1 if it was sent later, -1 if it was sent earlier, and 0 if that is not known.
    """
    if boot is None or seq is None or row.seq is None or row.seq == seq:
        return 0
    if row.boot != boot or row.site != site:
        return 0
    less, greater = sorted((seq, row.seq))
    if any(end - 16 <= greater < end and less < 16 for end in (2**8, 2**16, 2**32)):
        return 0
    if row.seq > seq:
        return 1
    sent = None if row.trust == "invalid" else row.event_time
    return 0 if newest is not None and sent is not None and sent > newest else -1


@dataclass
class Life:
    """Life of a device: its judged rows and fired deadlines, in order.

    All other facts are derived from them.
    """

    world: World
    device_id: str
    born: int
    since: int  # start of the present period in service
    now: int  # instant of the current row or deadline
    site: str = ""  # site of its first row
    log: list[Message] = field(default_factory=list)
    before: list[Message] = field(default_factory=list)  # log before it was registered again
    transitions: list[tuple[Any, ...]] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=list)
    clocks: list[str] = field(default_factory=lambda: ["on_time"])  # trust of each signal, after an initial right clock
    amended_count: int = 0  # number of leading `transitions` that are from the amended history
    numbered: int = 0  # number of transitions of this life that were emitted before the correction
    conflicts: list[int] = field(
        default_factory=list[int]
    )  # instants of reported identity conflicts since its last new registration
    delayed: set[int] = field(default_factory=set[int])  # indices of signals that were sent before the newest one
    alarmed: dict[int, str] = field(default_factory=dict[int, str])  # mode before each alarm, by its index
    without_data: set[int] = field(default_factory=set[int])  # indices of signals that are late or copies
    leading: set[int] = field(default_factory=set[int])  # indices of births that were sent after a signal received later

    @property
    def mode(self) -> str:
        return self.transitions[-1][5] if self.transitions else "provisioned"

    def device_class(self, before: int | None = None) -> str:
        return ["default", *(one.content.get("class") or "default" for one in self.log[:before] if one.kind == "registry")][-1]

    def class_and_limits(self, before: int | None = None) -> tuple[str, dict[str, int]]:
        """Return the class of the device, and its own limits."""
        entries = [{}, *(one.content for one in self.log[:before] if one.kind == "registry")]
        own = {name: entries[-1][name] for name in ("timeout_ms", "death_grace_ms") if entries[-1].get(name) is not None}
        return self.device_class(before), own

    def rules(self, index: int) -> dict[str, Any]:
        return self.world.rules(self.log[index].at, *self.class_and_limits(index))

    def places(self, index: int) -> list[tuple[str, int]]:
        """Return the sites of the device before the row at ``index``, with their starts.

        The registered site is first.
        """
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

    @property
    def clock(self) -> DeviceCoverage:
        """Covered time of the device, by its current site at each instant."""
        stays, newest, registered = list[tuple[int, str]](), (-1, -1), ""
        for one in self.log:
            moves = one.kind == "registry" and one.site != registered
            if one.kind in SIGNALS and one.arrival > newest:
                newest, moves = one.arrival, one.trust != "late"
            registered = one.site if one.kind == "registry" or not stays else registered
            if (one.kind in (*SIGNALS, "registry") and not stays) or (moves and one.site != stays[-1][1]):
                stays.append((one.at, one.site))
        return DeviceCoverage(self.world.listenings, stays or [(self.born, self.site)])

    def newest(self) -> int:
        """Return the newest instant of its facts; no later row takes effect before it."""
        entries = [index for index, one in enumerate(self.log) if one.kind == "registry"]
        changed = [
            self.log[at].at
            for at in entries
            if self.class_and_limits(at) != self.class_and_limits(at + 1) or self.log[at].site != self.at(at)
        ]
        facts = [self.last_seen(), self.since, self.cut_off_since(), *changed, *(change[7] for change in self.transitions[-1:])]
        facts += [death.at] if (death := self.death()) else []
        return max(one for one in facts if one is not None)

    def at(self, index: int) -> str:
        """Return the current site before the row at ``index``."""
        return self.places(index)[-1][0] if index else self.site

    def last_seen(self) -> int | None:
        return max((one.at for one in self.log if one.kind in SIGNALS), default=None)

    def runtime(self) -> int:
        """Return the runtime: covered time between successive signals within the timeout.

        The later signal must find the device alive.
        """
        covered, total = self.clock.covered, 0
        for one, then in pairwise(self.heard):
            gap = covered(then.at) - covered(one.at) - then.excused
            alive = one.since == then.since and then.found in (*PRESENT, *HELD, "unreachable")
            total += gap if alive and gap <= self.world.rules(then.at, *then.whose)["timeout_ms"] else 0
        return total

    def gateway(self, index: int) -> str | None:
        """Return the gateway that signals or registry last named before ``index``."""
        rows = [one for one in [*self.before, *self.log[:index]] if one.kind in (*SIGNALS, "registry") and one.trust != "late"]
        named = [one.gateway if one.kind in SIGNALS else one.content.get("gateway") for one in rows]
        return [None, *(one for one in named if one)][-1]

    def death(self) -> Message | None:
        """Return the will in effect: no signal after it, in arrival order, voids it."""
        stands: Message | None = None
        for index, one in enumerate(self.log):
            if one.kind in SIGNALS and stands and one.received_at >= stands.received_at:
                sent = one.received_at if one.trust != "on_time" else min(one.event_time or 0, one.received_at)
                stands = None if is_proof(one) or sent > stands.received_at else stands
            if one.kind != "death":
                continue
            if self.is_of_this_session(one, index) and not self.was_proved_after(one, index):
                stands = one
        return stands

    def was_proved_after(self, will: Message, index: int) -> bool:
        proofs = [old for old in self.log[:index] if old.kind in SIGNALS and is_proof(old)]
        return any(old.arrival > will.arrival for old in proofs)

    def cut_off_since(self) -> int | None:
        """Return the instant since which a dead gateway affects this device, or None."""
        marks = [one for one in self.log if one.kind in (*SIGNALS, "gateway_death", "over", "given_up")]
        return marks[-1].at if marks and marks[-1].kind == "gateway_death" else None

    def excused(self, through: int) -> int:
        """Return the covered time since the last signal during which the gateway was dead.

        It does not count as silence of the device.
        """
        covered, total, since = self.clock.covered, 0, None
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
        """Return whether its gateway is dead, and the grace period over."""
        since, covered = self.cut_off_since(), self.clock.covered
        grace = self.world.rules(self.now, *self.class_and_limits())["death_grace_ms"]
        return since is not None and covered(self.now) - covered(since) >= grace

    def field_of(self, index: int, word: str) -> Any:
        """Return a field of the device, such as boot, before the row at ``index``."""
        value, newest = None, (-1, -1)
        for at, old in enumerate(self.log[:index]):
            if old.kind not in SIGNALS:
                continue
            counts, newest = old.arrival > newest, max(newest, old.arrival)
            named, of_session = getattr(old, word), word in ("session", "boot", "seq")
            if at in self.leading:
                counts = of_session
            elif old.trust == "late":
                counts = counts and old.kind == "birth" and old.is_direct and of_session
            if old.trust == "late" and word == "seq" and value is not None:
                counts = counts and old.boot == self.field_of(at, "boot")
            if old.trust == "late" and word == "seq" and old.boot is None:
                counts = False
            value = named if counts and named is not None and at not in self.delayed else value
        return value

    def sent_by_its_clock(self, index: int) -> int | None:
        """Return the event time of the newest signal before ``index``, or None.

        A delayed signal counts as heard, but its clock does not.
        """
        signals = [at for at, one in enumerate(self.log[:index]) if one.kind in SIGNALS]
        timed = [self.log[at] for at in signals if at not in self.delayed]
        if not timed or timed[-1].trust == "invalid":
            return None
        ahead = 0 if timed[-1].trust == "on_time" else (timed[-1].event_time or 0) - timed[-1].received_at
        return self.log[signals[-1]].at + ahead

    def note_order(self, row: Message, index: int) -> None:
        """Note a signal that was sent earlier than the newest one, or a birth that was sent later but received earlier."""
        order = self.compare_counters(row, index) if row.kind in SIGNALS else 0
        received_last = not any(old.arrival >= row.arrival for old in self.log if old.kind in SIGNALS)
        if order < 0:
            self.delayed.add(index)
        elif order > 0 and row.kind == "birth" and row.trust != "late" and not received_last:
            self.leading.add(index)

    def compare_counters(self, row: Message, index: int) -> int:
        """Compare a signal with the newest one of its boot, by their counters.

        Returns:
            1 if it was sent later, -1 if it was sent earlier, and 0 if that is not known.
        """
        boot, seq = self.field_of(index, "boot"), self.field_of(index, "seq")
        return compare_counters(row, boot, seq, self.at(index), self.sent_by_its_clock(index))

    def has_rebooted(self, row: Message, index: int) -> bool:
        """Return whether a signal shows a reboot.

        It does if it names another boot. If no boot is named, its counter must have decreased
        without a wrap.
        """
        before = [old for old in self.log[:index] if old.kind in SIGNALS]
        if row.trust == "late" or any(old.arrival > row.arrival for old in before):
            return False
        if row.site != self.places(index)[-1][0]:
            return False
        boot, seq = self.field_of(index, "boot"), self.field_of(index, "seq")
        if row.boot is not None and boot is not None:
            return row.boot != boot
        if row.seq is None or seq is None or row.seq >= seq:
            return False
        return not any(end - 16 <= seq < end and row.seq < 16 for end in (2**8, 2**16, 2**32))

    def is_of_this_session(self, will: Message, index: int) -> bool:
        session, boot = self.field_of(index, "session"), self.field_of(index, "boot")
        if session is not None and will.session is not None:
            return session == will.session
        return boot is None or will.boot in (None, boot)

    def is_newest(self, row: Message, index: int) -> bool:
        if row.trust == "late" or index in self.delayed:
            return False
        return not any(old.arrival > row.arrival for old in self.log[:index] if old.kind in SIGNALS)

    def is_updated(self, row: Message, index: int) -> bool:
        """Return whether a signal names another firmware than before."""
        return (
            self.is_newest(row, index)
            and None not in (before := self.field_of(index, "firmware"), row.firmware)
            and (row.firmware != before)
        )

    def is_in_conflict(self, row: Message, index: int) -> bool:
        """Return whether a signal shows that one id is in use at two sites in turn."""
        (site, since), before = (places := self.places(index))[-1], [place for place, _ in places[-2:-1]]
        is_back = self.is_newest(row, index) and row.site != site and row.site in before and row.at - since < DAY
        return is_back and not any(row.at - one < DAY for one in self.conflicts)

    def has_no_data(self, row: Message) -> bool:
        """Return whether an error does not count, because it is late or a copy."""
        placeless = row.trust not in ("on_time", "late") or row.at != row.event_time
        seq, boot = self.field_of(len(self.log), "seq"), self.field_of(len(self.log), "boot")
        return row.trust == "late" or (placeless and row.seq is not None and row.seq == seq and row.boot in (None, boot))

    def errors(self, through: int) -> list[int]:
        return [index for index, one in enumerate(self.log[: through + 1]) if one.kind in ("error", "alarm")]

    def too_many(self, index: int) -> int | None:
        """Return until when the error at ``index`` degrades the device, or None."""
        errors = self.errors(index)

        def remembered(one: int, at: int) -> bool:
            """Return whether the error ``one`` counted at the error ``at``.

            It did if it was among the newest k, and within the window.
            """
            rules, since = self.rules(at), [error for error in errors if one <= error <= at]
            return len(since) <= rules["degraded_errors"] and self.log[at].at - self.log[one].at <= rules["degraded_window_ms"]

        counted = [one for one in errors if all(remembered(one, at) for at in errors if at >= one)]
        enough = len(counted) == self.rules(index)["degraded_errors"]
        return self.log[counted[0]].at + self.rules(index)["degraded_window_ms"] if enough else None

    def completes(self, index: int) -> int | None:
        """Return until when the error at ``index`` flags the device, or None.

        The error must be the last step of a sequence, and each step must be within its window since the first.
        """
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

    def flag(self) -> tuple[str, int] | None:
        """Return the cause of the flag in effect ("flagged" by a sequence, "review", or "confirm") and its end, or None."""
        found: tuple[str, int] | None = None
        for one in self.log:
            cause = None if found is None else found[0]
            if one.kind in ("hold_over", "session_over", "release"):
                found = None
            elif one.kind == "confirm":
                found = ("confirm", END)
            elif one.kind == "flagged" and cause != "confirm":
                found = ("flagged", one.at if cause != "review" or found is None else max(one.at, found[1]))
            elif one.kind == "review" and cause in (None, "review"):
                found = ("review", one.at)
        return found

    def names_another(self, index: int) -> bool:
        """Return whether the birth at ``index`` names another session or boot than was known before it."""
        words = ("session", "boot")
        known = {word: value for word in words if (value := self.field_of(index, word)) is not None}
        return any(value != self.field_of(index + 1, word) for word, value in known.items())

    def reviewed(self, index: int) -> int | None:
        """Return until when the signal or alarm at ``index`` flags the device for review, or None.

        It must be the last of enough events of its session, since the last of such events or the last release.
        """
        signals = [at for at, one in enumerate(self.log[: index + 1]) if one.kind in SIGNALS]
        found = dict(zip(signals, (one.found for one in self.heard[-len(signals) :]), strict=True))
        count, before = 0, None
        for at, one in enumerate(self.log[: index + 1]):
            if one.kind in ("release", "session_over"):
                count = 0
            if at not in found and one.kind != "alarm":
                continue
            rules, kind = self.rules(at), "error" if one.kind == "alarm" else one.kind
            needed: int | None = rules["velocity_events"]
            idle = before is not None and one.at - before > rules["session_idle_ms"]
            outside = idle or needed is None or (found | self.alarmed)[at] == "offline"
            if one.kind == "alarm" and (before is None or outside):
                continue  # it begins no session
            if one.kind != "alarm":
                count = 0 if outside or (one.kind == "birth" and self.names_another(at)) else count
                before = one.at
            of_code = kind != "error" or rules["velocity_code"] in (None, one.code or "unknown")
            if at in self.without_data or needed is None or kind != rules["velocity_kind"] or not of_code:
                continue
            count += 1
            if count < needed:
                continue
            if at == index:
                return one.at + rules["velocity_hold_ms"]
            count = 0
        return None

    def until(self, fact: str) -> int | None:
        """Return until when a fact holds; None if it has ended, or never started."""
        notes = [one for one in self.log if one.kind in (fact, *ENDS[fact])]
        return notes[-1].at if notes and notes[-1].kind == fact else None

    def live(self) -> str:
        """Return the mode of a device in service, by its facts."""
        facts = ["flagged"] if self.flag() is not None else []
        facts += ["degraded"] if self.until("degraded") is not None else []
        return "provisioned" if self.last_seen() is None else [*facts, "online"][0]

    def move_to(self, mode: str, trigger: str) -> None:
        if mode != self.mode:
            number = self.numbered + len(self.transitions) - self.amended_count + 1
            ids, change = (self.device_id, self.born, number), (self.mode, mode, trigger)
            self.transitions.append(("transition", *ids, *change, self.now, self.last_seen(), self.runtime()))
            if mode in ("offline", "decommissioned"):
                self.append_event("over", self.now)

    def next_deadline(self) -> tuple[int, int, str] | None:
        """Return the earliest deadline: instant, order at that instant, trigger."""
        mode, held, due = self.mode, self.until("hold") if self.mode in HELD else None, list[tuple[int | None, int, str]]()

        own = self.clock

        def over(since: int, limit: str, clock: Listening | None = None, excused: int = 0) -> int | None:
            return self.world.first_exceeded(
                clock or own, since, limit, self.class_and_limits(), max(self.now, held or 0), excused
            )

        quiet_since, death, cut_off = self.last_seen() or self.since, self.death(), self.cut_off_since()
        if mode in (*PRESENT, *HELD, "provisioned", "unreachable"):
            silent = over(quiet_since, "timeout_ms", excused=self.excused(self.now))
            due.append((silent if cut_off is None else over(cut_off, "gateway_outage_limit_ms"), 0, "silence"))
        if mode in (*PRESENT, *HELD, "unreachable") and death is not None:
            due.append((over(death.at, "death_grace_ms"), 1, "death"))
        if mode in PRESENT and cut_off is not None:
            due.append((over(cut_off, "death_grace_ms"), 2, "gateway_death"))
        due += [(held, 3, "until"), (self.until("degraded"), 4, "recovered")]
        flag = self.flag()
        if flag is not None and flag[0] != "confirm":
            due.append((flag[1], 5, "hold_over"))
        if flag is not None and flag[0] == "review":
            whose, event_time = self.class_and_limits(), Listening(0)
            idle = self.world.first_exceeded(event_time, quiet_since, "session_idle_ms", whose, self.now)
            due.append((idle, 6, "session_over"))
        if mode == "offline":
            due.append((over(quiet_since, "forget_after_ms", excused=self.excused(self.now)), 7, "forget"))
        if mode == "decommissioned":
            since = [change[7] for change in self.transitions if change[6] != "amended"][-1]
            due = [(over(since, "forget_after_ms", Listening(0)), 7, "forget")]
        return min(((at, place, trigger) for at, place, trigger in due if at is not None), default=None)

    def expire(self, before: int) -> None:
        """Fire all deadlines before an instant, in order."""
        while self.mode != "forgotten" and (due := self.next_deadline()) and due[0] < before:
            self.now, _, trigger = due
            if trigger in ("silence", "death", "gateway_death", "forget"):
                if trigger == "silence" and self.cut_off_since() is not None:
                    self.append_event("given_up", self.now)
                self.move_to({"forget": "forgotten", "gateway_death": "unreachable"}.get(trigger, "offline"), trigger)
                continue
            if trigger == "until" and self.last_seen() is not None and self.is_cut_off():
                self.append_event(trigger, self.now)
                self.move_to("unreachable", trigger)
                continue
            self.append_event(trigger, self.now)
            if trigger == "until" or self.mode == {"recovered": "degraded"}.get(trigger, "flagged"):
                self.move_to(self.live(), trigger)

    def append_event(self, what: str, at: int) -> None:
        """Append a fact with its end, or an event that ends a fact, to the log."""
        self.log.append(Message(self.now, what, self.device_id, at, own_clock=False))

    def judge(self, row: Message) -> str | None:
        """Apply one row; return the judgement about it if it cannot be applied, or None."""
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
        self.note_order(row, index)
        rebooted = row.kind in SIGNALS and (self.has_rebooted(row, index) or self.is_updated(row, index))
        if row.kind in SIGNALS and self.is_in_conflict(row, index):
            self.conflicts.append(row.at)
        if row.kind in SIGNALS and self.has_no_data(row):
            self.without_data.add(index)
            row = replace(row, kind="heartbeat" if row.kind == "error" else row.kind)
        self.log.append(row)
        if row.kind in SIGNALS:
            self.heard.append(Heard(row.at, self.mode, self.class_and_limits(), self.since, excused))
            self.clocks.append(self.clocks[-1] if index in self.delayed else row.trust)
        if row.kind in SIGNALS and self.mode in ("provisioned", "offline", "unreachable") and self.death() is None:
            self.move_to(self.live(), "signal")
        if rebooted and self.mode == "updating":
            self.move_to(self.live(), "updated")
        if row.kind == "error":
            self.count_error(index)
        if row.kind in SIGNALS:
            self.review(index)
        return None

    def review(self, index: int) -> None:
        if (until := self.reviewed(index)) is not None:
            self.append_event("review", until)
            self.move_to("flagged" if self.mode in PRESENT else self.mode, "velocity")

    def count_error(self, index: int) -> None:
        if (until := self.too_many(index)) is not None:
            self.append_event("degraded", until)
            self.move_to("degraded" if self.mode == "online" else self.mode, "errors")
        if (until := self.completes(index)) is not None:
            self.append_event("flagged", until)
            self.move_to("flagged" if self.mode in PRESENT else self.mode, "sequence")

    def registry(self, row: Message) -> None:
        if row.content["op"] == "decommission":
            self.move_to("decommissioned", "decommission")
            return
        if self.mode == "decommissioned":
            self.before, self.log, self.since, self.conflicts = [*self.before, *self.log], [], row.at, []
            self.delayed, self.leading, self.without_data = set(), set(), set()
            self.clocks.append("on_time")
            self.move_to("provisioned", "registered")
        behind = self.gateway(len(self.log))
        self.log.append(row)
        if self.cut_off_since() is not None and self.gateway(len(self.log)) != behind:
            self.append_event("over", row.at)
            self.move_to(self.live() if self.mode == "unreachable" else self.mode, "registered")

    def is_behind(self, event: Message) -> bool:
        return self.device_id != event.device_id == self.gateway(len(self.log))

    def of_gateway(self, row: Message) -> None:
        index = len(self.log)
        if not self.is_behind(row):
            return
        if row.kind == "gateway_return" and self.cut_off_since() is not None:
            self.append_event("over", row.at)
            self.move_to(self.live() if self.mode == "unreachable" else self.mode, "gateway_return")
        stays = self.mode in ("offline", "decommissioned") or self.cut_off_since() is not None
        if row.kind == "gateway_death" and not stays and not self.was_proved_after(row, index):
            self.log.append(row)

    def control(self, row: Message) -> str | None:
        operation = row.content["op"]
        if operation == "release":
            if self.mode != "updating" and self.flag() is None:
                return "refused"
            self.append_event("release", row.at)
            if self.mode in ("flagged", "updating"):
                cut_off = self.mode == "updating" and self.last_seen() is not None and self.is_cut_off()
                self.move_to("unreachable" if cut_off else self.live(), "released")
            return None
        if operation == "error":
            index, self.alarmed[len(self.log)] = len(self.log), self.mode
            self.log.append(replace(row, kind="alarm", code=row.content.get("code")))
            self.count_error(index)
            self.review(index)
            return None
        if operation == "confirm":
            if self.flag() is None:
                return "refused"
            self.append_event("confirm", row.at)
            return None
        if not row.at < row.content["until"] <= row.at + self.world.rules(row.at, *self.class_and_limits())["longest_hold_ms"]:
            return "refused"
        self.append_event("hold", row.content["until"])
        self.move_to("maintenance" if operation == "maintain" else "updating", operation)
        return None


def is_proof(signal: Message) -> bool:
    """Return whether a signal proves life at its receipt, whatever its clock."""
    return signal.is_direct or signal.kind == "birth"
