"""One device: what is remembered of it, and how rows and silence act on it, in the order of presence time.

Rule 1: ``expire`` and ``apply`` are called in the order of presence time (`core.clocks`); arrival order decides about wills.
Rule 2: silence, death, outages and forgetting count covered time; windows and holds count event time. The time from the death
of a device's gateway to its return is not silence of the device.
Rule 3: a row that corrects counts where the device is as it was when the row was worked out, and nowhere else.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from fleetpulse.core.device import Device, EvaluationContext
from fleetpulse.core.judgements import Judgement, JudgementKind, about, clock_fault, identity_conflict
from fleetpulse.core.lifecycle import HELD, PRESENT, Mode, Trigger, next_mode
from fleetpulse.core.policy import DEFAULT_CLASS, Rules
from fleetpulse.core.presence.coverage import Coverage
from fleetpulse.core.presence.presence_time import FAULTS, offset_ms
from fleetpulse.core.presence.shards import Advance, Due
from fleetpulse.core.registry.device_patch import corrected, fingerprint
from fleetpulse.core.registry.registry import limits
from fleetpulse.core.rows import EVERYONE, POSITION_BITS, SIGNALS, GatewayEvent, Kind, Row, Trust, session_number

NO_CODE: Final = "unknown"  # what an error without a code is remembered as
WRAP_SLACK: Final = 16  # a counter that wraps was so near to its end, and is so near to zero
CONFLICT_MS: Final = 86_400_000  # a device that is back within it speaks from two sites; it is reported once in it


@dataclass(slots=True)
class Fold:
    """Folds the rows of devices, one device at a time.

    Attributes:
        world: coverage and policies, known at least up to the instants that are judged.
        judgements: what came of it, in order.
    """

    world: EvaluationContext
    judgements: list[Judgement] = field(default_factory=list[Judgement])

    def run(self, device: Device | None, rows: list[Row], through_ms: int | None) -> Device | None:
        """Apply rows (in `rows.order`), silence acting between them, then let it act up to ``through_ms``.

        Returns:
            The device afterwards; None where it is unknown or forgotten.
        """
        for row in rows:
            if row.device_id == EVERYONE and (device is None or not _is_behind(device, row.gateway)):
                continue  # its gateway no more: no row of the device's, so no time passes for it
            device = self.expire(device, row.at_ms)
            device = self.apply(device, row)
        return device if through_ms is None else self.expire(device, through_ms + 1)

    def run_across(self, device: Device | None, due: Iterable[Due], advance: Advance) -> Device | None:
        """Apply rows of several shards, in the order in which they become due, silence acting between them.

        A row counts for no instant that was judged for its device before the row became due.

        Returns:
            The device afterwards; None where it is unknown or forgotten.
        """
        for each in due:
            row, at_ms = each.row, each.row.at_ms
            if row.device_id == EVERYONE and (
                device is None or each.shard != advance.shards.number(device.current_site) or not _is_behind(device, row.gateway)
            ):
                continue
            if device is not None:
                at_ms = max(at_ms, device.last_fact_ms, advance.judged_before(each, device.current_site) + 1)
                device = self.expire(device, at_ms)
                at_ms = row.at_ms if device is None else at_ms  # the state of a forgotten device is gone
            device = self.apply(device, row if at_ms == row.at_ms else replace(row, presence_ms=at_ms))
        return device

    def expire(self, device: Device | None, before_ms: int) -> Device | None:
        """Let deadlines act, earliest first, until none lies before ``before_ms``."""
        while device is not None:
            due = next_due(device, self.world)
            if due is None or due[0] >= before_ms:
                return device
            device = self._act(device, *due)
        return None

    def apply(self, device: Device | None, row: Row) -> Device | None:
        """Let one row act."""
        if row.is_for_everyone:
            self._gateway(device, row)
            return device
        if row.kind is Kind.REGISTRY:
            return self._registry(device, row)
        if row.kind is Kind.CORRECT:
            return self._correct(device, row)
        if row.kind is Kind.CONTROL:
            self._control(device, row)
        elif row.kind is Kind.DEATH:
            self._death(device, row)
        elif row.kind in SIGNALS:
            return self._signal(device, row)
        return device

    def _rules(self, device: Device, instant_ms: int) -> Rules:
        return device.rules(self.world.policies.at(instant_ms).policy)

    def _change(self, device: Device, trigger: Trigger, at_ms: int, row: Row | None = None, why: str = "") -> None:
        """Take the way that the table gives, and write it down; nothing where it leads nowhere."""
        mode = next_mode(
            device.mode,
            trigger,
            heard=device.last_seen_ms is not None,
            degraded=device.degraded_until_ms is not None,
            flagged=device.flagged_until_ms is not None,
            cut_off=device.mode in HELD and self._is_cut_off(device, at_ms),
        )
        if mode is device.mode:
            return
        self._tell(device, (device.mode, mode), trigger, at_ms, row, why)
        device.mode, device.mode_since_ms = mode, at_ms
        if mode not in HELD:
            device.held_until_ms = None
        if mode in (Mode.OFFLINE, Mode.DECOMMISSIONED):
            self._end_outage(device, at_ms)

    def _is_cut_off(self, device: Device, at_ms: int) -> bool:
        """Whether a device's gateway is dead, and the grace is over."""
        if device.outage_covered_ms is None:
            return False
        return self.world.coverage(device).covered(at_ms) - device.outage_covered_ms >= self._rules(device, at_ms).death_grace_ms

    def _end_outage(self, device: Device, at_ms: int) -> None:
        """Let silence count again; nothing where the gateway is not dead."""
        if device.outage_covered_ms is not None:
            device.excused_ms += self.world.coverage(device).covered(at_ms) - device.outage_covered_ms
            device.outage_ms = device.outage_covered_ms = None

    def _tell(self, device: Device, way: tuple[Mode, Mode], trigger: Trigger, at_ms: int, row: Row | None, why: str = "") -> None:
        """Number a change from one mode to another, and write it down."""
        dated = self.world.policies.at(at_ms)
        shown = dated.policy.of(device.device_class).last_errors
        device.transition_no += 1
        self.judgements.append(
            Judgement(
                JudgementKind.TRANSITION,
                device.device_id,
                site=device.site,
                event_time_ms=at_ms,
                device_class=device.device_class,
                life_ms=device.life_ms,
                transition_no=device.transition_no,
                from_mode=way[0],
                to_mode=way[1],
                trigger=trigger,
                last_seen_ms=device.last_seen_ms,
                runtime_ms=device.runtime_ms,
                last_errors=device.codes[-shown:] if shown else (),
                gateway=device.gateway,
                policy_version=dated.policy.version,
                received_at_ms=row.received_at_ms if row else None,
                message_kind=row.kind.value if row else None,
                boot=row.boot if row else None,
                seq=row.seq if row else None,
                reason=why or None,
            )
        )

    def _act(self, device: Device, at_ms: int, trigger: Trigger) -> Device | None:
        """Let one deadline act."""
        if trigger is Trigger.RECOVERED:
            device.degraded_until_ms = None
        elif trigger is Trigger.HOLD_OVER:
            device.flagged_until_ms = None
        elif trigger is Trigger.UNTIL:
            device.held_until_ms = None
        elif trigger is Trigger.SILENCE and device.outage_ms is not None:  # what forgets it counts from here
            device.outage_ms = device.outage_covered_ms = None
            device.excused_ms = self.world.coverage(device).covered(at_ms) - device.quiet_covered_ms
        self._change(device, trigger, at_ms)
        return None if device.mode is Mode.FORGOTTEN else device

    def _born(self, row: Row, device_class: str) -> Device:
        at_ms = row.at_ms
        return Device(
            row.device_id,
            row.site,
            device_class,
            None if row.trust is Trust.LATE else row.gateway,
            life_ms=at_ms,
            quiet_since_ms=at_ms,
            quiet_covered_ms=self.world.covered(row.site, at_ms),
            mode_since_ms=at_ms,
            class_since_ms=at_ms,
        )

    def _registry(self, device: Device | None, row: Row) -> Device | None:
        content, at_ms = row.contents(), row.at_ms
        operation = content.get("op")
        if operation == "decommission":
            if device is None:
                self._refuse(row, "there is no such device to decommission")
            else:
                self._change(device, Trigger.DECOMMISSION, at_ms, row)
            return device
        if operation != "add":
            self._refuse(row, f'a registry row adds or decommissions; got "{operation}"')
            return device
        try:
            timeout_ms, death_grace_ms = limits(content)
        except ValueError as fault:
            self._refuse(row, str(fault))
            return device
        device_class = str(content.get("class") or DEFAULT_CLASS)
        if device is None:
            device = self._born(row, device_class)
        elif device.mode is Mode.DECOMMISSIONED:
            self._recommission(device, row)
        if (device.device_class, device.timeout_ms, device.death_grace_ms) != (device_class, timeout_ms, death_grace_ms):
            device.device_class, device.class_since_ms = device_class, at_ms
            device.timeout_ms, device.death_grace_ms = timeout_ms, death_grace_ms
        gateway = content.get("gateway") or device.gateway
        moved = device.outage_ms is not None and gateway != device.gateway
        before = self.world.coverage(device)
        if row.site != device.site:
            device.speaks_from = device.spoke_from = device.moved_ms = None
        device.site, device.gateway = row.site, gateway
        if self._recount(device, before, at_ms):
            device.class_since_ms = at_ms  # later rows count for no earlier instant
        if moved:
            self._end_outage(device, at_ms)
            self._change(device, Trigger.REGISTERED, at_ms, row)
        return device

    def _recount(self, device: Device, before: Coverage, at_ms: int) -> bool:
        """Convert covered times to the coverage of the device's current site; the time elapsed up to ``at_ms`` is kept.

        Returns:
            Whether the coverage has changed.
        """
        after = self.world.coverage(device)
        if after is before:
            return False
        moved_ms = after.covered(at_ms) - before.covered(at_ms)
        device.quiet_covered_ms += moved_ms
        if device.death_covered_ms is not None:
            device.death_covered_ms += moved_ms
        if device.outage_covered_ms is not None:
            device.outage_covered_ms += moved_ms
        return True

    def _recommission(self, device: Device, row: Row) -> None:
        device.last_seen_ms = device.boot = device.seq = device.session = device.firmware = None
        device.speaks_from = device.spoke_from = device.moved_ms = device.conflict_ms = None
        device.heard_arrival = device.proved_arrival = device.clock_offset_ms = None
        device.clock = Trust.ON_TIME
        device.degraded_until_ms = device.flagged_until_ms = device.death_ms = device.death_covered_ms = None
        device.outage_ms, device.outage_covered_ms, device.excused_ms = None, None, 0
        device.error_times_ms, device.progress = (), ()
        device.quiet_since_ms, device.quiet_covered_ms = row.at_ms, self.world.coverage(device).covered(row.at_ms)
        self._change(device, Trigger.REGISTERED, row.at_ms, row)

    def _control(self, device: Device | None, row: Row) -> None:
        content, at_ms = row.contents(), row.at_ms
        operation = content.get("op")
        if device is None or device.mode is Mode.DECOMMISSIONED:
            self._refuse(row, "there is no such device in service")
        elif operation == "release":
            if device.mode is not Mode.UPDATING and device.flagged_until_ms is None:
                self._refuse(row, f"release ends an update or a flag; the device is {device.mode}, without either")
                return
            device.flagged_until_ms = None
            device.progress = ()
            self._change(device, Trigger.RELEASED, at_ms, row)
        elif operation in ("maintain", "update"):
            until, rules = content.get("until"), self._rules(device, at_ms)
            if type(until) is not int or not rules.may_hold(at_ms, until):
                self._refuse(row, f"until lies after the command, by {rules.longest_hold_ms} ms at most; got {until}")
                return
            trigger = Trigger.MAINTAIN if operation == "maintain" else Trigger.UPDATE
            self._change(device, trigger, at_ms, row)
            device.held_until_ms = until
        else:
            self._refuse(row, f'a control row maintains, updates or releases; got "{operation}"')

    def _correct(self, device: Device | None, row: Row) -> Device | None:
        """Go on as the amended history says, if it was worked out for the device as it is now."""
        content, at_ms = row.contents(), row.at_ms
        covered_ms = self.world.covered(row.site if device is None else device.current_site, at_ms)
        if content.get("was") != fingerprint(device, covered_ms, at_ms):
            self._refuse(row, "the device has moved on since this was worked out: amend again")
            return device
        try:
            wanted = corrected(row.device_id, content.get("device"), lambda site: self.world.covered(site, at_ms))
        except ValueError as fault:
            self._refuse(row, str(fault))
            return device
        due = next_due(wanted, self.world) if wanted is not None else None
        if due is not None and due[0] < at_ms:
            self._refuse(row, "what is due of the device by now has not acted in what it is to be: amend again")
            return device
        before = device.mode if device is not None else Mode.PROVISIONED
        after = wanted.mode if wanted is not None else Mode.FORGOTTEN
        about_it = wanted or device
        if about_it is not None and after is not before:
            self._tell(about_it, (before, after), Trigger.AMENDED, at_ms, row)
        return wanted

    def _refuse(self, row: Row, why: str) -> None:
        self.judgements.append(about(row, JudgementKind.REFUSED, why))

    def _death(self, device: Device | None, row: Row) -> None:
        """Note a will: silence has its grace left. A will of another session is ignored.

        A device that was heard after it, in arrival order, has voided it, even if the signal has been judged before.
        """
        if device is None or device.mode is Mode.DECOMMISSIONED:
            return
        if _is_of_its_session(device, row) and not _was_heard_after(device, row):
            device.death_ms, device.death_covered_ms = row.received_at_ms, self.world.coverage(device).covered(row.at_ms)

    def _gateway(self, device: Device | None, row: Row) -> None:
        """Let the death or the return of a device's gateway act.

        From the death on its silence does not count. A device that was heard after the death is not concerned, and one that is
        offline stays so.
        """
        if device is None:
            return
        if row.gateway_event is GatewayEvent.RETURN:
            self._end_outage(device, row.at_ms)
            self._change(device, Trigger.GATEWAY_RETURN, row.at_ms)
            return
        stays = device.outage_ms is not None or device.mode in (Mode.OFFLINE, Mode.DECOMMISSIONED)
        if not stays and not _was_heard_after(device, row):
            device.outage_ms, device.outage_covered_ms = row.at_ms, self.world.coverage(device).covered(row.at_ms)

    def _signal(self, device: Device | None, row: Row) -> Device | None:
        at_ms = row.at_ms
        dated, is_late = self.world.policies.at(at_ms), row.trust is Trust.LATE
        rules = dated.policy.of(DEFAULT_CLASS) if device is None else device.rules(dated.policy)
        if is_late and not proves_alive(row, rules):
            return device
        if device is None:
            if dated.policy.unknown_devices == "quarantine":
                self._list(row, JudgementKind.UNKNOWN_DEVICE)
                return None
            device = self._born(row, DEFAULT_CLASS)
        if device.mode is Mode.DECOMMISSIONED:
            self._list(row, JudgementKind.AFTER_DECOMMISSION)
            return device
        copied, reboots, firmware = _is_copy(device, row), device.reboots, device.firmware
        self._end_outage(device, at_ms)
        self._heard(device, row)
        if device.death_ms is None or voids(row, device.death_ms):
            device.death_ms = device.death_covered_ms = None
            self._change(device, Trigger.SIGNAL, at_ms, row)
        if device.reboots > reboots or (firmware is not None and device.firmware != firmware):
            self._change(device, Trigger.UPDATED, at_ms, row)
        if row.kind is Kind.ERROR and not (is_late or copied):
            self._error(device, row)
        return device

    def _list(self, row: Row, verdict: JudgementKind) -> None:
        """List a signal that changes nothing; a late one is listed already."""
        if row.trust is not Trust.LATE:
            self.judgements.append(about(row, verdict))

    def _heard(self, device: Device, row: Row) -> None:
        """Note a signal: last seen, runtime, clock; of one that is not late reboots and gateway, of a late birth its session."""
        at_ms, covered = row.at_ms, self.world.coverage(device).covered(row.at_ms)
        gap = covered - device.quiet_covered_ms - device.excused_ms
        present = device.mode in PRESENT or device.mode in HELD or device.mode is Mode.UNREACHABLE
        if device.last_seen_ms is not None and present and gap <= self._rules(device, at_ms).timeout_ms:
            device.runtime_ms += gap
        device.last_seen_ms = device.quiet_since_ms = at_ms
        device.quiet_covered_ms, device.excused_ms = covered, 0
        if row.trust in FAULTS and row.trust is not device.clock:
            self.judgements.append(about(row, JudgementKind.CLOCK, clock_fault(row.trust, offset_ms(row))))
        device.clock, device.clock_offset_ms = row.trust, offset_ms(row)
        newest = device.heard_arrival is None or device.heard_arrival < row.arrival
        if row.trust is not Trust.LATE:
            device.gateway = row.gateway if row.gateway is not None else device.gateway
            if newest:
                self._numbered(device, row)
        elif newest and row.kind is Kind.BIRTH and row.is_direct:
            self._named(device, row)  # it names the current connection, even with a slow clock
        if newest:
            device.heard_arrival = row.arrival
        if row.is_direct or row.kind is Kind.BIRTH:
            device.proved_arrival = max(device.proved_arrival or row.arrival, row.arrival)

    def _numbered(self, device: Device, row: Row) -> None:
        """Note the session, boot, counter, firmware and site of a signal that was received after those heard before.

        One that comes from another site counts as no reboot: its numbers may be another device's.
        """
        if row.site != (device.speaks_from or device.site):
            self._moved(device, row)
        elif row.boot is not None and device.boot is not None:
            device.reboots += row.boot != device.boot
        elif row.seq is not None and device.seq is not None:
            device.reboots += fell_back(device.seq, row.seq)
        self._named(device, row)
        device.seq = row.seq if row.seq is not None else device.seq
        device.firmware = row.firmware if row.firmware is not None else device.firmware

    def _named(self, device: Device, row: Row) -> None:
        """Note the session and boot that a signal names."""
        device.boot = row.boot if row.boot is not None else device.boot
        device.session = session_number(row.session) if row.session is not None else device.session

    def _moved(self, device: Device, row: Row) -> None:
        """Note that a device speaks from another site, and report the one that is back within a day."""
        at_ms, here = row.at_ms, device.speaks_from or device.site
        is_back = row.site == device.spoke_from and device.moved_ms is not None and at_ms - device.moved_ms < CONFLICT_MS
        if is_back and (device.conflict_ms is None or at_ms - device.conflict_ms >= CONFLICT_MS):
            device.conflict_ms = at_ms
            self.judgements.append(about(row, JudgementKind.IDENTITY_CONFLICT, identity_conflict(row.site, here)))
        before = self.world.coverage(device)
        device.spoke_from, device.moved_ms = here, at_ms
        device.speaks_from = None if row.site == device.site else row.site
        self._recount(device, before, at_ms)

    def _error(self, device: Device, row: Row) -> None:
        """Count an error into the facts: degraded by number, flagged by order."""
        at_ms, rules = row.at_ms, self._rules(device, row.at_ms)
        counted = (*device.error_times_ms, at_ms)[-rules.degraded_errors :]
        device.error_times_ms = tuple(then for then in counted if at_ms - then <= rules.degraded_window_ms)
        device.codes = (*device.codes, row.code or NO_CODE)[-rules.last_errors :] if rules.last_errors else ()
        if len(device.error_times_ms) == rules.degraded_errors:
            device.degraded_until_ms = device.error_times_ms[0] + rules.degraded_window_ms
            self._change(device, Trigger.ERRORS, at_ms, row)
        if _advance(device, rules, row.code or NO_CODE, at_ms):
            device.flagged_until_ms = at_ms + rules.flagged_hold_ms
            self._change(device, Trigger.SEQUENCE, at_ms, row)


def proves_alive(row: Row, rules: Rules) -> bool:
    """Whether a late signal proves that its device was alive when it was received."""
    return row.is_direct if rules.late_proves_alive is None else rules.late_proves_alive


def voids(row: Row, death_ms: int) -> bool:
    """Whether a signal that is judged after a will voids it: in one shard each does, for it was received after the will.

    Args:
        row: the signal.
        death_ms: ``received_at`` of the will.
    """
    sent_ms = row.received_at_ms if row.trust is not Trust.ON_TIME else min(row.event_time_ms or 0, row.received_at_ms)
    return row.received_at_ms >= death_ms and (row.is_direct or row.kind is Kind.BIRTH or sent_ms > death_ms)


def _is_behind(device: Device, gateway: str | None) -> bool:
    return gateway == device.gateway != device.device_id


def _was_heard_after(device: Device, row: Row) -> bool:
    """Whether the device proved, after a will in arrival order, that it is alive."""
    return device.proved_arrival is not None and device.proved_arrival >= row.arrival


def _is_of_its_session(device: Device, row: Row) -> bool:
    """Whether a will is of the device's session; of its boot where not both name a session."""
    if row.session is not None and device.session is not None:
        return session_number(row.session) == device.session
    return row.boot is None or device.boot is None or row.boot == device.boot


def _is_copy(device: Device, row: Row) -> bool:
    """Whether a signal whose presence time is not its event time repeats the number of the signal before it."""
    placeless = row.trust in FAULTS or row.at_ms != row.event_time_ms
    return placeless and row.seq is not None and row.seq == device.seq and row.boot in (None, device.boot)


def fell_back(before: int, after: int) -> bool:
    """Whether a counter fell back because its device restarted; counters of 8, 16 and 32 bits also wrap."""
    wraps = any(2**bits - WRAP_SLACK <= before < 2**bits and after < WRAP_SLACK for bits in (8, 16, 32))
    return after < before and not wraps


def settle(device: Device, frontier_ms: int) -> None:
    """Forget places in arrival order at or before the frontier: every row that is judged later was received after it."""
    least = (frontier_ms + 1) << POSITION_BITS
    for name in ("heard_arrival", "proved_arrival"):
        value = getattr(device, name)
        if value is not None and value < least:
            setattr(device, name, None)


def _advance(device: Device, rules: Rules, code: str, at_ms: int) -> bool:
    """Advance the sequence by one code; True where that completes it. The latest start of each prefix is kept."""
    steps = rules.flagged_codes
    progress: list[int | None] = [None] * (len(steps) - 1)
    if device.progress_of == steps and device.progress:
        progress = list(device.progress)
    complete = False
    for step in reversed(range(len(steps))):
        if steps[step] != code:
            continue
        start = at_ms if step == 0 else progress[step - 1]
        if start is None or at_ms - start > rules.flagged_window_ms:
            continue
        if step == len(steps) - 1:
            complete = True
        else:
            progress[step] = start
    started = any(start is not None for start in progress)
    device.progress, device.progress_of = (tuple(progress), steps) if started else ((), ())
    return complete


def next_due(device: Device, world: EvaluationContext) -> tuple[int, Trigger] | None:
    """Return the earliest deadline of a device and what acts then; silence before facts at the same instant."""
    due = [item for item in _deadlines(device, world) if item is not None]
    return min(due, key=lambda item: item[0]) if due else None


def _deadlines(device: Device, world: EvaluationContext) -> Iterator[tuple[int, Trigger] | None]:
    """Yield deadlines in the order in which they act at the same instant."""
    held = device.held_until_ms if device.mode in HELD else None
    least_ms = device.mode_since_ms if held is None else held
    if device.mode in PRESENT or device.mode in HELD or device.mode in (Mode.PROVISIONED, Mode.UNREACHABLE):
        if device.outage_ms is None:
            yield _at(_silent(device, world, least_ms, lambda rules: rules.timeout_ms), Trigger.SILENCE)
        else:
            yield _at(_cut_off(device, world, least_ms, lambda rules: rules.gateway_outage_limit_ms), Trigger.SILENCE)
        if device.mode is not Mode.PROVISIONED:
            yield _at(_dead(device, world, least_ms), Trigger.DEATH)
        if device.mode in PRESENT:
            yield _at(_cut_off(device, world, least_ms, lambda rules: rules.death_grace_ms), Trigger.GATEWAY_DEATH)
    if held is not None:
        yield held, Trigger.UNTIL
    if device.degraded_until_ms is not None:
        yield device.degraded_until_ms, Trigger.RECOVERED
    if device.flagged_until_ms is not None:
        yield device.flagged_until_ms, Trigger.HOLD_OVER
    if device.mode is Mode.OFFLINE:
        yield _at(_silent(device, world, least_ms, lambda rules: rules.forget_after_ms), Trigger.FORGET)
    if device.mode is Mode.DECOMMISSIONED:
        yield _at(_out_of_service(device, world), Trigger.FORGET)


def _at(due_ms: int | None, trigger: Trigger) -> tuple[int, Trigger] | None:
    return None if due_ms is None else (due_ms, trigger)


def _silent(device: Device, world: EvaluationContext, least_ms: int, limit: Callable[[Rules], int]) -> int | None:
    """Return when silence reaches a limit."""
    quiet_ms = device.quiet_covered_ms + device.excused_ms
    return _reached(
        device,
        world,
        max(least_ms, device.quiet_since_ms),
        lambda rules: world.coverage(device).earliest(quiet_ms + limit(rules)),
    )


def _dead(device: Device, world: EvaluationContext, least_ms: int) -> int | None:
    """Return when the grace after the will is over."""
    if device.death_ms is None or device.death_covered_ms is None:
        return None
    dead_ms = device.death_covered_ms
    return _reached(
        device,
        world,
        max(least_ms, device.death_ms),
        lambda rules: world.coverage(device).earliest(dead_ms + rules.death_grace_ms),
    )


def _cut_off(device: Device, world: EvaluationContext, least_ms: int, limit: Callable[[Rules], int]) -> int | None:
    """Return when the time since the death of its gateway reaches a limit."""
    if device.outage_ms is None or device.outage_covered_ms is None:
        return None
    dead_ms = device.outage_covered_ms
    return _reached(
        device, world, max(least_ms, device.outage_ms), lambda rules: world.coverage(device).earliest(dead_ms + limit(rules))
    )


def _out_of_service(device: Device, world: EvaluationContext) -> int | None:
    """Return when the tombstone goes: by event time."""
    return _reached(device, world, device.mode_since_ms, lambda rules: device.mode_since_ms + rules.forget_after_ms)


def _reached(device: Device, world: EvaluationContext, least_ms: int, due: Callable[[Rules], int | None]) -> int | None:
    """Return the first instant, not before ``least_ms``, at which a limit is reached by the policy and class then in force.

    A policy whose span was over then is not asked: it may have been dropped.
    """
    least_ms = max(least_ms, device.class_since_ms)
    for dated, since_ms, end_ms in world.policies.spans(least_ms):
        due_ms = due(device.rules(dated.policy))
        if due_ms is not None:
            due_ms = max(due_ms, since_ms, least_ms)
            if end_ms is None or due_ms < end_ms:
                return due_ms
    return None
