"""What is remembered of one device, and what it is judged by.

Rule: every field has a bound, so that a device has one.
"""

from dataclasses import dataclass, replace

from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.policy import Policies, Policy, Rules
from fleetpulse.core.presence.coverage import Coverage
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.rows import Trust


@dataclass(slots=True)
class Device:
    """What is remembered of one device. Instants are epoch milliseconds (event time).

    Attributes:
        device_id: its identity; the other attributes may change.
        life_ms: event time of the life's first row.
        quiet_since_ms: since when silence counts: the last signal, or the registration.
        quiet_covered_ms: covered time at that instant.
        class_since_ms: since when it is of its class, with limits of its own as it has them.
        error_times_ms: errors that may still count towards degraded, oldest first: bounded by the rule's number.
        codes: of the last errors, oldest first, as many as the rules show.
        progress: for each step of the flagged sequence but the last, the latest start of a match so far.
        progress_of: the sequence that ``progress`` is about.
        held_until_ms: announced end of maintenance or update.
        death_ms: when its newest will was delivered that no later signal has voided.
        outage_ms: when its gateway died; None unless the gateway is dead.
        outage_covered_ms: covered time at that instant.
        excused_ms: covered time since the last signal in which its gateway was dead: it is not silence.
        session: hash of the name of its connection to the broker, see `rows.session_number`.
        heard_arrival: `Row.arrival` of the newest signal that was heard, while a row received before it may still be judged.
        proved_arrival: likewise of the newest that the device delivered itself, or that announced its start.
        clock: the class of its newest signal's event time.
        clock_offset_ms: event time less ``received_at`` of a newest signal that was late or had a clock fault; None if invalid.
        timeout_ms: its own timeout, from the registry; None: that of its class.
        death_grace_ms: likewise its own grace after a will.
        firmware: version of its firmware, as it last named it.
        speaks_from: the site that its newest signal came from; None: ``site``.
        spoke_from: the site that its signals came from before that; None: no other.
        moved_ms: when the one followed the other.
        conflict_ms: when its id was last reported to speak from two sites in turn.
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

    @property
    def current_site(self) -> str:
        """The site of its newest signal: that site's bridge gives its covered time and frontier."""
        return self.speaks_from or self.site

    @property
    def last_fact_ms(self) -> int:
        """The latest instant of its facts: a row that is judged later counts for no earlier instant."""
        facts_ms = (self.quiet_since_ms, self.mode_since_ms, self.class_since_ms, self.death_ms, self.outage_ms)
        return max(instant_ms for instant_ms in facts_ms if instant_ms is not None)

    def rules(self, policy: Policy) -> Rules:
        """Return the rules of its class, with the limits that are its own."""
        rules = policy.of(self.device_class)
        if self.timeout_ms is not None:
            rules = replace(rules, timeout_ms=self.timeout_ms)
        return rules if self.death_grace_ms is None else replace(rules, death_grace_ms=self.death_grace_ms)


@dataclass(frozen=True, slots=True)
class EvaluationContext:
    """Coverage of the sites, and policies in force: the context in which devices are judged."""

    shards: Shards
    policies: Policies

    def coverage(self, device: Device) -> Coverage:
        """Return the coverage of a device's current site."""
        return self.shards.of(device.current_site).coverage

    def covered(self, site: str, instant_ms: int) -> int:
        """Return the covered time of a site at an instant, in milliseconds."""
        return self.shards.of(site).coverage.covered(instant_ms)
