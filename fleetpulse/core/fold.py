"""Fold of one device: apply rows and deadlines to its state, and emit judgements.

Theory of operation
===================

This module defines the verdicts. `Fold` takes the state of one device (`core.device.Device`) and
the rows that concern it. It returns the new state and adds judgements to a list. `core.replay`
decides which rows are due, and orders them. `columnar.jit.kernel` is the compiled form of the
common cases; it must emit the same judgements (ADR 6).

Inputs:

- *Rows*: messages of the device, control, registry and correction rows, and deaths and returns of
  its gateway. They lie at or before the frontier (ADR 1), and copies are removed. ``Row.at_ms`` is
  the instant of a row: the presence time of a signal, ``received_at`` of a will, and the effective
  instant of any other row.
- *Context* (`EvaluationContext`): coverage of the sites and the policies in force, known at least
  up to the frontier.

Two orders. Rows are applied in the order of presence time (`rows.order`), so the result does not
depend on batches. This order can differ from the order of delivery. For example, a birth that was
built before its device connected has a lower event time than the will of the previous connection.
Therefore arrival order (``Row.arrival``) decides about wills, sessions and restarts (ADR 32).

Main loop (`Fold.run`), for each row:

1. `Fold.expire` fires each deadline that lies before the instant of the row, earliest first. The
   state is then the state just before the row. A deadline at the same instant does not fire yet, so
   a message exactly at the deadline is in time.
2. `Fold.apply` applies the row, by its kind.

After the last row, `Fold.expire` fires the deadlines up to the frontier. Deadlines are not stored:
`deadlines.next_due` derives the next one each time. At the same instant silence, death and the death of
a gateway fire first, then the end of a hold, then facts about errors.

Steps for a signal (`Fold._signal`), and the reason for their order:

1. Ignore a late signal that does not prove its device alive. The late filter has listed it already.
2. Without state, start a new life, or list the signal if the policy quarantines unknown devices.
3. List the signal of a decommissioned device; do nothing else.
4. End the outage of the gateway, so that its time is excluded from the silence measured in step 5.
5. Record the signal: runtime, last seen, clock, session, boot, counter and site.
6. Void the pending will and fire ``SIGNAL``. If the signal does not void the will, the mode stays.
   This follows step 5, since the next mode depends on whether the device was ever heard.
7. Fire ``UPDATED`` if step 5 found a restart or another firmware.
8. Count an error, and fire ``ERRORS`` and ``SEQUENCE``; then count an event of the velocity rule, and fire
   ``VELOCITY``. This is last: these triggers have an effect only on a device that is in service again.

Sessions (ADR 48). The velocity rule counts events within one session of a device: signals of which no
two successive ones are further apart than ``session.idle``, until the device is offline or a birth names
another session or boot. `Fold._signal` finds the end of a session at the first signal after it; the state
has only the count. An alarm is an error that belongs to the session that goes on (`Fold._alarm`).

Flags. A device has at most one flag. A confirmed flag ends by a command only. The flag of a sequence
replaces one for review, and the velocity rule sets none while the device has another.

A will (`Fold._death`) only records its instant; its grace period is a deadline. The death of a
gateway (`Fold._gateway`) opens an outage: until the return, silence does not count (ADR 33).

Several shards. If the rows of a device belong to sites with different frontiers, `Fold.run_across`
applies them in the order in which they become due (ADR 36). It raises the instant of a row above
every instant that was judged for the device before.

Invariants:

Rule 1: `Fold.expire` and `Fold.apply` are called in the order of presence time.
Rule 2: silence, grace periods, outages and forgetting after silence count covered time. Windows, sessions,
holds and the removal of a decommissioned device count event time. The time from the death of a
device's gateway to its return is not silence of the device.
Rule 3: the result depends on state, rows and context alone: no clock, no batch boundary, no I/O.
Expiring to one instant and then to a later one equals expiring to the later one.
Rule 4: each change of the mode emits exactly one transition; `lifecycle.next_mode` determines the
mode, except for a correction. Transitions of a life are numbered from 1 without gaps.
Rule 5: a correction row acts only if the device matches its fingerprint; else it is refused
(ADR 13).
Rule 6: no row raises an error: a row that cannot take effect emits a judgement of kind ``refused``.
Rule 7: a forgotten device has no state: it is None.

docs/concepts/semantics.md specifies the effects. `core.lifecycle` defines the modes,
`core.presence.coverage` covered time, and `core.presence.presence_time` the classes of event times.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from fleetpulse.core.deadlines import next_due
from fleetpulse.core.device import Device, EvaluationContext
from fleetpulse.core.judgements import Judgement, JudgementKind, clock_fault, identity_conflict, message_judgement
from fleetpulse.core.lifecycle import HELD, PRESENT, Mode, Trigger, next_mode
from fleetpulse.core.policy import DEFAULT_CLASS, Rules
from fleetpulse.core.presence.coverage import Coverage
from fleetpulse.core.presence.presence_time import FAULTS, offset_ms
from fleetpulse.core.presence.sending_order import fell_back, was_sent_earlier, was_sent_later
from fleetpulse.core.presence.shards import Advance, Due
from fleetpulse.core.registry.device_patch import decode_device, fingerprint
from fleetpulse.core.registry.registry import limits
from fleetpulse.core.rows import EVERYONE, OP_ERROR, SIGNALS, GatewayEvent, Kind, Row, Trust, session_number
from fleetpulse.core.signals import (
    advance_sequence,
    as_error,
    end_session,
    is_another,
    is_behind,
    is_copy,
    is_of_its_session,
    is_session_over,
    proves_alive,
    voids,
    was_heard_after,
)
from fleetpulse.core.streams.commands import COMMAND
from fleetpulse.core.times import DAY_MS

NO_CODE: Final = "unknown"  # code of an error without a code
CONFLICT_MS: Final = DAY_MS  # an id that returns to a site within this time is in conflict; reported at most once in it


@dataclass(slots=True)
class Fold:
    """Fold of the rows of devices, one device at a time.

    Attributes:
        context: coverage and policies, known at least up to the instants that are judged.
        judgements: judgements emitted so far, in order.
    """

    context: EvaluationContext
    judgements: list[Judgement] = field(default_factory=list[Judgement])

    def run(self, device: Device | None, rows: list[Row], through_ms: int | None) -> Device | None:
        """Apply rows in `rows.order`, and fire the deadlines that lie between them.

        Args:
            device: state before the rows; None if the device is unknown.
            rows: rows of the device and events of gateways.
            through_ms: instant up to which deadlines fire after the last row; None: none fires.

        Returns:
            The state afterwards; None if the device is unknown or forgotten.
        """
        for row in rows:
            if row.device_id == EVERYONE and (device is None or not is_behind(device, row.gateway)):
                continue  # the event concerns another gateway than that of the device: no deadline fires
            device = self.expire(device, row.at_ms)
            device = self.apply(device, row)
        return device if through_ms is None else self.expire(device, through_ms + 1)

    def run_across(self, device: Device | None, due: Iterable[Due], advance: Advance) -> Device | None:
        """Apply rows of several shards as they become due, and fire deadlines.

        The instant of a row is raised above every instant that was judged for its device before the
        row became due.

        Args:
            device: state before the rows; None if the device is unknown.
            due: rows of the device and events of gateways, see `Advance.in_order`.
            advance: movement of the frontiers by which the rows are due.

        Returns:
            The state afterwards; None if the device is unknown or forgotten.
        """
        for each in due:
            row, at_ms = each.row, each.row.at_ms
            if row.device_id == EVERYONE and (
                device is None or each.shard != advance.shards.number(device.current_site) or not is_behind(device, row.gateway)
            ):
                continue
            if device is not None:
                at_ms = max(at_ms, device.last_fact_ms, advance.judged_before(each, device.current_site) + 1)
                device = self.expire(device, at_ms)
                at_ms = row.at_ms if device is None else at_ms  # a new life starts at the instant of its row
            device = self.apply(device, row if at_ms == row.at_ms else replace(row, presence_ms=at_ms))
        return device

    def expire(self, device: Device | None, before_ms: int) -> Device | None:
        """Fire deadlines, earliest first, until none lies before ``before_ms``."""
        while device is not None:
            due = next_due(device, self.context)
            if due is None or due[0] >= before_ms:
                return device
            device = self.fire(device, *due)
        return None

    def apply(self, device: Device | None, row: Row) -> Device | None:
        """Apply one row to a device; return its state afterwards."""
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
        return device.rules(self.context.policies.at(instant_ms).policy)

    def _transition(self, device: Device, trigger: Trigger, at_ms: int, row: Row | None = None, why: str = "") -> None:
        """Make and emit the transition that the table defines; no-op if there is none."""
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
        self._emit_transition(device, (device.mode, mode), trigger, at_ms, row, why)
        device.mode, device.mode_since_ms = mode, at_ms
        if mode not in HELD:
            device.held_until_ms = None
        if mode in (Mode.OFFLINE, Mode.DECOMMISSIONED):
            self._end_outage(device, at_ms)

    def _is_cut_off(self, device: Device, at_ms: int) -> bool:
        """Whether the gateway of a device is dead and the grace period over."""
        if device.outage_covered_ms is None:
            return False
        return (
            self.context.coverage(device).covered(at_ms) - device.outage_covered_ms >= self._rules(device, at_ms).death_grace_ms
        )

    def _end_outage(self, device: Device, at_ms: int) -> None:
        """End the outage of the gateway: silence counts again; no-op if there is no outage."""
        if device.outage_covered_ms is not None:
            device.excused_ms += self.context.coverage(device).covered(at_ms) - device.outage_covered_ms
            device.outage_ms = device.outage_covered_ms = None

    def _emit_transition(
        self, device: Device, way: tuple[Mode, Mode], trigger: Trigger, at_ms: int, row: Row | None, why: str = ""
    ) -> None:
        """Number a change of the mode, and emit it as a transition."""
        dated = self.context.policies.at(at_ms)
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

    def fire(self, device: Device, at_ms: int, trigger: Trigger) -> Device | None:
        """Fire one deadline."""
        if trigger is Trigger.RECOVERED:
            device.degraded_until_ms = None
        elif trigger is Trigger.HOLD_OVER:
            device.flagged_until_ms = device.review_ms = None
        elif trigger is Trigger.SESSION_OVER:
            device.flagged_until_ms = device.review_ms = None
            end_session(device)
        elif trigger is Trigger.UNTIL:
            device.held_until_ms = None
        elif trigger is Trigger.SILENCE and device.outage_ms is not None:  # forget_after counts from this instant
            device.outage_ms = device.outage_covered_ms = None
            device.excused_ms = self.context.coverage(device).covered(at_ms) - device.quiet_covered_ms
        self._transition(device, trigger, at_ms)
        return None if device.mode is Mode.FORGOTTEN else device

    def _new_device(self, row: Row, device_class: str) -> Device:
        at_ms = row.at_ms
        return Device(
            row.device_id,
            row.site,
            device_class,
            None if row.trust is Trust.LATE else row.gateway,
            life_ms=at_ms,
            quiet_since_ms=at_ms,
            quiet_covered_ms=self.context.covered(row.site, at_ms),
            mode_since_ms=at_ms,
            class_since_ms=at_ms,
        )

    def _registry(self, device: Device | None, row: Row) -> Device | None:
        content, at_ms = row.contents(), row.at_ms
        operation = content.get("op")
        if operation == "decommission":
            if device is None:
                self._refuse(row, "unknown device")
            else:
                self._transition(device, Trigger.DECOMMISSION, at_ms, row)
            return device
        if operation != "add":
            self._refuse(row, f'op of a registry row must be "add" or "decommission"; got "{operation}"')
            return device
        try:
            timeout_ms, death_grace_ms = limits(content)
        except ValueError as fault:
            self._refuse(row, str(fault))
            return device
        device_class = str(content.get("class") or DEFAULT_CLASS)
        if device is None:
            device = self._new_device(row, device_class)
        elif device.mode is Mode.DECOMMISSIONED:
            self._recommission(device, row)
        if (device.device_class, device.timeout_ms, device.death_grace_ms) != (device_class, timeout_ms, death_grace_ms):
            device.device_class, device.class_since_ms = device_class, at_ms
            device.timeout_ms, device.death_grace_ms = timeout_ms, death_grace_ms
        gateway = content.get("gateway") or device.gateway
        moved = device.outage_ms is not None and gateway != device.gateway
        before = self.context.coverage(device)
        if row.site != device.site:
            device.speaks_from = device.spoke_from = device.moved_ms = None
        device.site, device.gateway = row.site, gateway
        if self._recount(device, before, at_ms):
            device.class_since_ms = at_ms  # rows that are judged later take effect no earlier
        if moved:
            self._end_outage(device, at_ms)
            self._transition(device, Trigger.REGISTERED, at_ms, row)
        return device

    def _recount(self, device: Device, before: Coverage, at_ms: int) -> bool:
        """Convert covered times to the coverage of the device's current site.

        The covered time elapsed up to ``at_ms`` is kept.

        Returns:
            Whether the coverage has changed.
        """
        after = self.context.coverage(device)
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
        device.review_ms = device.confirmed_ms = None
        end_session(device)
        device.quiet_since_ms, device.quiet_covered_ms = row.at_ms, self.context.coverage(device).covered(row.at_ms)
        self._transition(device, Trigger.REGISTERED, row.at_ms, row)

    def _control(self, device: Device | None, row: Row) -> None:
        content, at_ms = row.contents(), row.at_ms
        operation = content.get("op")
        if operation == COMMAND:
            return  # it concerns the device, and no verdict depends on it
        if device is None or device.mode is Mode.DECOMMISSIONED:
            self._refuse(row, "unknown or decommissioned device")
        elif operation == "release":
            if device.mode is not Mode.UPDATING and device.flagged_until_ms is None:
                self._refuse(row, f"release ends an update or a flag; the device has neither, and is {device.mode}")
                return
            device.flagged_until_ms = device.review_ms = device.confirmed_ms = None
            device.progress = ()
            end_session(device)
            self._transition(device, Trigger.RELEASED, at_ms, row)
        elif operation == "confirm":
            if device.flagged_until_ms is None:
                self._refuse(row, f"confirm is for a flag; the device has none, and is {device.mode}")
                return
            device.confirmed_ms = at_ms if device.confirmed_ms is None else device.confirmed_ms
            device.review_ms = None
        elif operation == OP_ERROR:
            self._alarm(device, as_error(row))
        elif operation in ("maintain", "update"):
            until, rules = content.get("until"), self._rules(device, at_ms)
            if type(until) is not int or not rules.may_hold(at_ms, until):
                self._refuse(row, f"until must lie after the command, by at most {rules.longest_hold_ms} ms; got {until}")
                return
            trigger = Trigger.MAINTAIN if operation == "maintain" else Trigger.UPDATE
            self._transition(device, trigger, at_ms, row)
            device.held_until_ms = until
        else:
            known = f'"maintain", "update", "release", "confirm" or "{OP_ERROR}"'
            self._refuse(row, f'op of a control row must be {known}; got "{operation}"')

    def _correct(self, device: Device | None, row: Row) -> Device | None:
        """Replace the state by the amended one if the row's fingerprint matches."""
        content, at_ms = row.contents(), row.at_ms
        covered_ms = self.context.covered(row.site if device is None else device.current_site, at_ms)
        if content.get("was") != fingerprint(device, covered_ms, at_ms):
            self._refuse(row, "the device has changed since the correction was computed; amend again")
            return device
        try:
            amended = decode_device(row.device_id, content.get("device"), lambda site: self.context.covered(site, at_ms))
        except ValueError as fault:
            self._refuse(row, str(fault))
            return device
        due = next_due(amended, self.context) if amended is not None else None
        if due is not None and due[0] < at_ms:
            self._refuse(row, "a deadline of the corrected device has passed already; amend again")
            return device
        before = device.mode if device is not None else Mode.PROVISIONED
        after = amended.mode if amended is not None else Mode.FORGOTTEN
        reported = amended or device
        if reported is not None and after is not before:
            self._emit_transition(reported, (before, after), Trigger.AMENDED, at_ms, row)
        return amended

    def _refuse(self, row: Row, why: str) -> None:
        self.judgements.append(message_judgement(row, JudgementKind.REFUSED, why))

    def _death(self, device: Device | None, row: Row) -> None:
        """Record a will, which starts the grace period.

        A will of another session is ignored. A signal that was received after the will voids it,
        even if the signal was judged before.
        """
        if device is None or device.mode is Mode.DECOMMISSIONED:
            return
        if is_of_its_session(device, row) and not was_heard_after(device, row):
            device.death_ms, device.death_covered_ms = row.received_at_ms, self.context.coverage(device).covered(row.at_ms)

    def _gateway(self, device: Device | None, row: Row) -> None:
        """Apply the death or the return of the gateway of a device.

        From the death on, silence of the device does not count. The death has no effect on a device
        that is offline, or that was heard after the death in arrival order.
        """
        if device is None:
            return
        if row.gateway_event is GatewayEvent.RETURN:
            self._end_outage(device, row.at_ms)
            self._transition(device, Trigger.GATEWAY_RETURN, row.at_ms)
            return
        is_unaffected = device.outage_ms is not None or device.mode in (Mode.OFFLINE, Mode.DECOMMISSIONED)
        if not is_unaffected and not was_heard_after(device, row):
            device.outage_ms, device.outage_covered_ms = row.at_ms, self.context.coverage(device).covered(row.at_ms)

    def _signal(self, device: Device | None, row: Row) -> Device | None:
        at_ms = row.at_ms
        dated, is_late = self.context.policies.at(at_ms), row.trust is Trust.LATE
        rules = dated.policy.of(DEFAULT_CLASS) if device is None else device.rules(dated.policy)
        if is_late and not proves_alive(row, rules):
            return device
        if device is None:
            if dated.policy.unknown_devices == "quarantine":
                self._list(row, JudgementKind.UNKNOWN_DEVICE)
                return None
            device = self._new_device(row, DEFAULT_CLASS)
        if device.mode is Mode.DECOMMISSIONED:
            self._list(row, JudgementKind.AFTER_DECOMMISSION)
            return device
        copied, reboots, firmware = is_copy(device, row), device.reboots, device.firmware
        connection, is_over = (device.session, device.boot), is_session_over(device, rules, at_ms)
        self._end_outage(device, at_ms)
        self._record_signal(device, row)
        if is_over or (row.kind is Kind.BIRTH and is_another(connection, (device.session, device.boot))):
            end_session(device)
        if device.death_ms is None or voids(row, device.death_ms):
            device.death_ms = device.death_covered_ms = None
            self._transition(device, Trigger.SIGNAL, at_ms, row)
        if device.reboots > reboots or (firmware is not None and device.firmware != firmware):
            self._transition(device, Trigger.UPDATED, at_ms, row)
        if row.kind is Kind.ERROR and not (is_late or copied):
            self._error(device, row)
        if rules.is_event(row.kind, row.code or NO_CODE) and not (is_late or copied):
            self.count_event(device, row, rules)
        return device

    def _list(self, row: Row, verdict: JudgementKind) -> None:
        """Emit a judgement about a signal without effect; a late signal has one already."""
        if row.trust is not Trust.LATE:
            self.judgements.append(message_judgement(row, verdict))

    def _record_signal(self, device: Device, row: Row) -> None:
        """Record a signal: last seen, runtime, clock, gateway, session and counter.

        A late signal changes neither gateway nor counter. Exception: a late direct birth sets the
        session, and the counter within its boot. A signal that was sent before the newest one, and
        delivered after it, changes neither clock nor session nor counter.
        """
        at_ms, covered = row.at_ms, self.context.coverage(device).covered(row.at_ms)
        gap = covered - device.quiet_covered_ms - device.excused_ms
        present = device.mode in PRESENT or device.mode in HELD or device.mode is Mode.UNREACHABLE
        if device.last_seen_ms is not None and present and gap <= self._rules(device, at_ms).timeout_ms:
            device.runtime_ms += gap
        is_older = was_sent_earlier(device, row)
        device.last_seen_ms = device.quiet_since_ms = at_ms
        device.quiet_covered_ms, device.excused_ms = covered, 0
        if not is_older:
            if row.trust in FAULTS and row.trust is not device.clock:
                self.judgements.append(message_judgement(row, JudgementKind.CLOCK, clock_fault(row.trust, offset_ms(row))))
            device.clock, device.clock_offset_ms = row.trust, offset_ms(row)
        newest = device.heard_arrival is None or device.heard_arrival < row.arrival
        if row.trust is not Trust.LATE:
            device.gateway = row.gateway if row.gateway is not None else device.gateway
            if newest and not is_older:
                self._record_counters(device, row)
            elif row.kind is Kind.BIRTH and was_sent_later(device, row):
                self._record_session(device, row)  # a signal sent before this birth was delivered again, after it
                device.seq = row.seq
        elif newest and not is_older and row.kind is Kind.BIRTH and row.is_direct:
            if row.boot is not None and row.seq is not None and (row.boot == device.boot or device.seq is None):
                device.seq = row.seq
            self._record_session(device, row)  # a late birth names the current session, too
        if newest:
            device.heard_arrival = row.arrival
        if row.is_direct or row.kind is Kind.BIRTH:
            device.proved_arrival = max(device.proved_arrival or row.arrival, row.arrival)

    def _record_counters(self, device: Device, row: Row) -> None:
        """Record session, boot, counter, firmware and site of the signal received last.

        A signal from another site is not counted as a reboot: its numbers may be of another device.
        """
        if row.site != (device.speaks_from or device.site):
            self._record_move(device, row)
        elif row.boot is not None and device.boot is not None:
            device.reboots += row.boot != device.boot
        elif row.seq is not None and device.seq is not None:
            device.reboots += fell_back(device.seq, row.seq)
        self._record_session(device, row)
        device.seq = row.seq if row.seq is not None else device.seq
        device.firmware = row.firmware if row.firmware is not None else device.firmware

    def _record_session(self, device: Device, row: Row) -> None:
        """Record the session and boot that a signal names."""
        device.boot = row.boot if row.boot is not None else device.boot
        device.session = session_number(row.session) if row.session is not None else device.session

    def _record_move(self, device: Device, row: Row) -> None:
        """Record the new site of a device; report an identity conflict.

        The conflict is reported if the device is back at its previous site within a day.
        """
        at_ms, current_site = row.at_ms, device.speaks_from or device.site
        is_back = row.site == device.spoke_from and device.moved_ms is not None and at_ms - device.moved_ms < CONFLICT_MS
        if is_back and (device.conflict_ms is None or at_ms - device.conflict_ms >= CONFLICT_MS):
            device.conflict_ms = at_ms
            self.judgements.append(
                message_judgement(row, JudgementKind.IDENTITY_CONFLICT, identity_conflict(row.site, current_site))
            )
        before = self.context.coverage(device)
        device.spoke_from, device.moved_ms = current_site, at_ms
        device.speaks_from = None if row.site == device.site else row.site
        self._recount(device, before, at_ms)

    def _error(self, device: Device, row: Row) -> None:
        """Count an error; fire ``ERRORS`` at the limit within the window, ``SEQUENCE`` at its last code."""
        at_ms, rules = row.at_ms, self._rules(device, row.at_ms)
        counted = (*device.error_times_ms, at_ms)[-rules.degraded_errors :]
        device.error_times_ms = tuple(then for then in counted if at_ms - then <= rules.degraded_window_ms)
        device.codes = (*device.codes, row.code or NO_CODE)[-rules.last_errors :] if rules.last_errors else ()
        if len(device.error_times_ms) == rules.degraded_errors:
            device.degraded_until_ms = device.error_times_ms[0] + rules.degraded_window_ms
            self._transition(device, Trigger.ERRORS, at_ms, row)
        if advance_sequence(device, rules, row.code or NO_CODE, at_ms):
            until_ms = at_ms + rules.flagged_hold_ms
            if device.review_ms is not None:  # its flag for review becomes one of the sequence, and ends no earlier
                until_ms, device.review_ms = max(until_ms, device.flagged_until_ms or 0), None
            device.flagged_until_ms = until_ms
            self._transition(device, Trigger.SEQUENCE, at_ms, row)

    def _alarm(self, device: Device, row: Row) -> None:
        """Count an alarm as an error, and as an event of the session that goes on; it begins and prolongs no session."""
        rules = self._rules(device, row.at_ms)
        in_session = device.last_seen_ms is not None and not is_session_over(device, rules, row.at_ms)
        self._error(device, row)
        if in_session and rules.is_event(Kind.ERROR, row.code or NO_CODE):
            self.count_event(device, row, rules)

    def count_event(self, device: Device, row: Row, rules: Rules) -> None:
        """Count an event of the velocity rule; fire ``VELOCITY`` at the last that the rule needs, and count anew.

        The rule does not replace another flag.
        """
        assert rules.velocity_events is not None, "the rule is on"
        device.velocity_count += 1
        device.velocity_since_ms = row.at_ms if device.velocity_since_ms is None else device.velocity_since_ms
        if device.velocity_count < rules.velocity_events:
            return
        end_session(device)
        if device.flagged_until_ms is None or device.review_ms is not None:
            device.review_ms, device.flagged_until_ms = row.at_ms, row.at_ms + rules.velocity_hold_ms
            self._transition(device, Trigger.VELOCITY, row.at_ms, row)
