"""State of one device, and the context in which the fold evaluates it.

Rule: every field has a bound, so the state of a device has a bound.
"""

from dataclasses import dataclass, replace

from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.policy import Policies, Policy, Rules
from fleetpulse.core.presence.coverage import Coverage
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.rows import Trust


@dataclass(slots=True)
class Device:
    """State of one device; instants are epoch milliseconds (event time).

    Attributes:
        device_id: identity of the device; all other attributes may change.
        life_ms: event time of the first row of the life.
        quiet_since_ms: instant from which silence counts: last signal, or registration.
        quiet_covered_ms: covered time at ``quiet_since_ms``.
        class_since_ms: instant since which its class and its own limits are in force.
        error_times_ms: instants of errors that may still count towards degraded, oldest first; at
            most as many as the rule ``degraded.errors``.
        codes: codes of the last errors, oldest first; at most as many as the rule ``last_errors``.
        progress: latest start of a match, for each step of the flagged sequence but the last.
        progress_of: flagged sequence that ``progress`` belongs to.
        flagged_until_ms: instant at which its flag ends, unless it is confirmed; None: it is not flagged.
        held_until_ms: announced end of maintenance or update.
        death_ms: ``received_at`` of the newest will, unless a later signal has voided it.
        death_covered_ms: covered time at ``death_ms``.
        outage_ms: instant of the death of its gateway; None unless the gateway is dead.
        outage_covered_ms: covered time at ``outage_ms``.
        excused_ms: covered time since the last signal in which its gateway was dead; no silence.
        session: hash of the name of the connection to the broker, see `rows.session_number`.
        heard_arrival: `Row.arrival` of the newest signal, kept while a row that was received before
            it may still be judged.
        proved_arrival: `Row.arrival` of the newest birth, or of the newest signal that the device
            delivered itself; kept as long as ``heard_arrival``.
        clock: class of the event time of the newest signal.
        clock_offset_ms: event time less ``received_at`` of the newest signal, if it was late or had
            a clock fault; None if it was on time or its event time is invalid.
        timeout_ms: timeout that the registry sets for the device; None: that of its class.
        death_grace_ms: grace period after a will that the registry sets for the device; None: that
            of its class.
        firmware: firmware version that the device reported last.
        speaks_from: site of the newest signal; None: ``site``.
        spoke_from: site of the signals before the last move; None: no other site.
        moved_ms: instant of the last move between sites.
        conflict_ms: instant of the last identity conflict reported for this id.
        velocity_count: number of events that the velocity rule has counted in the session of the
            device; less than the rule ``velocity.events`` in force at the last of them.
        velocity_since_ms: instant of the first of these events; None without any.
        review_ms: instant of the event by which the velocity rule flagged the device; None if it has no
            flag, or one of the sequence, or a confirmed one.
        confirmed_ms: instant at which a person confirmed the flag, which then ends only by a command.
    """

    device_id: str
    site: str
    device_class: str
    gateway: str | None
    life_ms: int
    quiet_since_ms: int
    quiet_covered_ms: int
    mode: Mode = Mode.PROVISIONED
    transition_no: int = 0
    mode_since_ms: int = 0
    class_since_ms: int = 0
    last_seen_ms: int | None = None
    boot: str | None = None
    seq: int | None = None
    reboots: int = 0
    runtime_ms: int = 0
    error_times_ms: tuple[int, ...] = ()
    codes: tuple[str, ...] = ()
    progress: tuple[int | None, ...] = ()
    progress_of: tuple[str, ...] = ()
    degraded_until_ms: int | None = None
    flagged_until_ms: int | None = None
    held_until_ms: int | None = None
    death_ms: int | None = None
    death_covered_ms: int | None = None
    outage_ms: int | None = None
    outage_covered_ms: int | None = None
    excused_ms: int = 0
    session: int | None = None
    heard_arrival: int | None = None
    proved_arrival: int | None = None
    clock: Trust = Trust.ON_TIME
    clock_offset_ms: int | None = None
    timeout_ms: int | None = None
    death_grace_ms: int | None = None
    firmware: str | None = None
    speaks_from: str | None = None
    spoke_from: str | None = None
    moved_ms: int | None = None
    conflict_ms: int | None = None
    velocity_count: int = 0
    velocity_since_ms: int | None = None
    review_ms: int | None = None
    confirmed_ms: int | None = None

    @property
    def current_site(self) -> str:
        """Site of the newest signal, whose covered time and frontier apply to the device."""
        return self.speaks_from or self.site

    @property
    def last_fact_ms(self) -> int:
        """Latest instant of the facts in its state: a row that is judged later takes effect no earlier."""
        facts_ms = (self.quiet_since_ms, self.mode_since_ms, self.class_since_ms, self.death_ms, self.outage_ms)
        return max(instant_ms for instant_ms in facts_ms if instant_ms is not None)

    def rules(self, policy: Policy) -> Rules:
        """Return the rules of its class, with the limits that the registry sets."""
        rules = policy.of(self.device_class)
        if self.timeout_ms is not None:
            rules = replace(rules, timeout_ms=self.timeout_ms)
        return rules if self.death_grace_ms is None else replace(rules, death_grace_ms=self.death_grace_ms)


@dataclass(frozen=True, slots=True)
class EvaluationContext:
    """Context of the fold: coverage of the sites, and the policies in force."""

    shards: Shards
    policies: Policies

    def coverage(self, device: Device) -> Coverage:
        """Return the coverage of the current site of a device."""
        return self.shards.of(device.current_site).coverage

    def covered(self, site: str, instant_ms: int) -> int:
        """Return the covered time of a site at an instant, in milliseconds."""
        return self.shards.of(site).coverage.covered(instant_ms)
