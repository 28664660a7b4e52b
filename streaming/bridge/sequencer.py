"""Rules of the bridge: stamp and order messages, and report coverage gaps.

This module uses no network, file or clock.

Rule 1: ``received_at`` never runs backwards, not even across restarts. A row of the bridge itself
shares its ``received_at`` with no other row, except commands about different devices.
Rule 2: only `written` releases a message for acknowledgement, once its segment is on disk.
Rule 3: while history is played, nothing else is taken. Each line is taken once, in order, see
`RecordingSequencer`.
Rule 4: after a coverage gap, its gap row precedes every other row.
Rule 5: a message beyond the rate limits of its device is refused, except the newest small one of each
second, see `SparedMessages`. A message that makes several rows is never spared.
Rule 6: the messages of new devices beyond their quota are refused, see `DeviceQuota`.
Rule 7: a row whose topic is too long or not printable is refused. Its topic is escaped and
truncated.
Rule 8: the first bridge takes the commands of programs at all sites, see `program_commands`.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from fleetpulse.core.messages.decode import Rejection, program_command
from fleetpulse.core.messages.mapping import NO_MAPPINGS, Mappings
from fleetpulse.core.messages.replay_envelope import TOPIC_PREFIX, Envelope
from fleetpulse.core.messages.sparkplug import is_command
from fleetpulse.core.presence.shards import served_sites
from fleetpulse.core.rows import EVERYONE, FLUSH, SPARED_BYTES, Kind, Origin, Reason
from fleetpulse.core.streams.commands import is_control, is_for_device
from fleetpulse.io.ingest.segments import BridgePosition, SegmentRow
from fleetpulse.io.mqtt.subscriber import AckToken, Arrived
from streaming.bridge.buffer import SegmentBuffer
from streaming.bridge.device_quota import DeviceQuota
from streaming.bridge.program_commands import ProgramCommands
from streaming.bridge.rate_limit import RateLimiter, SparedMessages
from streaming.bridge.replay_sequencer import LineAction, RecordingSequencer

REASON_FLOOD: Final[Reason] = "flood"  # reason to refuse a row
REASON_NEW: Final[Reason] = "new_device"  # reason to refuse a row
REASON_TOPIC: Final[Reason] = "topic"  # reason to refuse a row
COUNTED: Final[Mapping[Reason, str]] = {REASON_FLOOD: "flooded", REASON_NEW: "new_devices"}  # name of each count
REFUSED_LINES: Final[Mapping[LineAction, Reason]] = {LineAction.DOUBLED: "field", LineAction.CROWDED: "size"}
MAX_TOPIC: Final = 512  # bytes, nearly twice the longest topic of a device
CONTINUES_MS: Final = 60_000  # history that ended within this time continues live without a gap
CANARIES: Final = 1_000  # limit of canaries in flight: a backlog delays one per interval
SLACK_MS: Final = 5_000
_ORDINARY_TOPICS: Final = 100_000  # limit of the cache of ordinary topics


class BridgeSequencer:
    """State of a bridge, and the rules that change it.

    Args:
        bridge: name of the bridge.
        position: position from its newest segment; None at the first start.
        grace_ms: time after a coverage gap in which devices may still be reconnecting.
        interval_ms: time between two canaries.
        secret: key that signs canaries, so that the bridge recognises those of its earlier
            processes.
        holds_back: whether verdicts are delayed by a jitter, so that a flush must request them at
            the end of the rows.
        floods: rate limiter of devices; None for no limit.
        quota: quota of new devices; None for no limit.
        others: names of the other bridges, see `share`.
        sites: sites of a further bridge; empty otherwise.
        takes_foreign: whether it takes topics of other formats.
        mappings: mappings that decode messages of other formats.
        takes_commands: whether it takes commands of programs.
    """

    def __init__(
        self,
        bridge: str,
        position: BridgePosition | None,
        *,
        grace_ms: int = 120_000,
        interval_ms: int = 5_000,
        secret: bytes = b"",
        holds_back: bool = False,
        floods: RateLimiter | None = None,
        quota: DeviceQuota | None = None,
        others: frozenset[str] = frozenset(),
        sites: frozenset[str] = frozenset(),
        takes_foreign: bool = False,
        mappings: Mappings = NO_MAPPINGS,
        takes_commands: bool = False,
    ) -> None:
        self.bridge = bridge
        self.program_commands = ProgramCommands()
        self.shared = position.shared if position else frozenset[str]()
        self.promised_ms: int | None = None
        self.canary_topic = f"fleet/{EVERYONE}/{bridge}/{Kind.TICK.value}"
        self.live = False
        self.last_ms = position.received_at_ms if position else None
        self.last_canary_ms = position.last_canary_ms if position else None
        self.gap_open = position.gap_open if position else False
        self.history = RecordingSequencer.after(position)
        self.counts = {"rejected": 0, "repeated": 0, "retained": 0, "stale_canaries": 0, "flooded": 0}
        self.counts |= {"elsewhere": 0, "commands": 0, "new_devices": 0}
        self.rejection: str | None = None
        self.buffer = SegmentBuffer()
        self._grace_ms = grace_ms
        self._interval_ms = interval_ms
        self._secret = secret
        self._holds_back = holds_back
        self._floods, self._quota = floods or RateLimiter(0), quota or DeviceQuota()
        self._spared = SparedMessages()
        self._other_canaries = frozenset(f"fleet/{EVERYONE}/{other}/{Kind.TICK.value}" for other in others)
        self._sites, self._takes_foreign, self._mappings = sites, takes_foreign, mappings
        self._takes_commands = takes_commands
        self._to_share: tuple[frozenset[str], int] | None = None
        self._ordinary_topics: set[str] = set()  # cache of ordinary topics of live devices
        self._durable = self._memory()
        self._own_last = position is not None
        self._commanded: tuple[int, set[str]] = (-1, set())  # instant of the newest commands, and their devices
        self._since_ms: int | None = None  # start of listening while no canary has come back yet
        self._heard_ms = 0  # wall time of the newest proof that the bridge is listening
        self._canaries: dict[str, int] = {}
        self._sent = 0
        self._opened_at = 0  # number of canaries sent when the gap was opened

    # ---- phases

    def go_live(self, now_ms: int) -> None:
        """Go live; open a coverage gap for the time before, unless history just ended."""
        self.live, self._heard_ms = True, now_ms
        if self.last_ms is None:
            return
        self._floods.away_since(self.last_ms)
        if self.history.ended and now_ms - self.last_ms <= CONTINUES_MS:
            self._since_ms = self.last_ms
            return
        self._open(now_ms, "start", self.last_ms if self.last_canary_ms is None else self.last_canary_ms)
        self._close_left_open(now_ms)

    def lost(self, now_ms: int, cause: str = "broker") -> None:
        """Handle a lost connection: drop unacknowledged messages, which the broker redelivers."""
        dropped, spared_places, self.buffer = self.buffer, self._spared.places(), SegmentBuffer()
        self._spared = SparedMessages()
        for place, (row, token) in enumerate(zip(dropped.rows(), dropped.tokens, strict=True)) if self.live else ():
            if token is None:
                self.buffer.add(row, None)
            elif (why := dropped.limited.get(place)) is not None:
                self.counts[COUNTED[why]] -= 1
            elif place not in spared_places:
                sender = dropped.senders.get(place)
                rows = self._mappings.row_count(row.topic, row.payload) if sender is None else 1
                self._floods.refund(sender or self._floods.sender(row.topic), len(row.payload), rows)
        if not self.live:
            self.last_ms, self.last_canary_ms, self.gap_open, history = self._durable
            self.history = history.copy()
        self._canaries.clear()
        for topic, size_bytes in self.program_commands.lost():
            self._floods.refund(self._floods.sender(topic), size_bytes)
        if self.live:
            self._floods.away_since(min(self._heard_ms, now_ms))
            self.open_gap(now_ms, cause)

    # ---- messages

    def arrived_together(self, messages: Sequence[Arrived], now_ms: int) -> None:
        """Take messages, with the same effect as `arrived` for each; ordinary messages are batched."""
        if not messages:
            return
        topics, payloads, retained, tokens = zip(*messages, strict=True)
        start, unusual = 0, iter(range(len(messages)))
        if self.live and self._ordinary_topics.issuperset(topics) and not any(retained):
            unusual = iter(())
        elif self.live:  # checked one by one: a canary may hand over sites to other bridges
            unusual = (place for place in unusual if retained[place] or not self._is_ordinary(topics[place]))
        for place in unusual:
            self._arrived_ordinary(topics[start:place], payloads[start:place], tokens[start:place], now_ms)
            self.arrived(messages[place], now_ms)
            start = place + 1
        self._arrived_ordinary(topics[start:], payloads[start:], tokens[start:], now_ms)

    def _arrived_ordinary(
        self, topics: Sequence[str], payloads: Sequence[bytes], tokens: Sequence[AckToken | None], now_ms: int
    ) -> None:
        """Take consecutive ordinary messages, all with one stamp."""
        if not topics:
            return
        stamp = self._stamp(now_ms)
        self.last_ms, self._own_last = stamp, False
        self._since_ms = stamp if self._since_ms is None else self._since_ms
        first = self.buffer.add_ordinary(stamp, topics, payloads, tokens)
        for place, sender in self._floods.exceeding(topics, now_ms, [*map(len, payloads)]).items():
            self._refuse_flood(sender, topics[place], payloads[place], stamp, first + place)

    def _refuse_flood(self, sender: str, topic: str, payload: bytes, received_at_ms: int, place: int) -> None:
        """Refuse a message beyond its sender's limits, or the spared one before it."""
        is_small = len(payload) <= SPARED_BYTES and self._mappings.row_count(topic, payload) == 1
        refused = self._spared.newest(sender, topic, received_at_ms, place) if is_small else place
        if refused is not None:
            self.counts["flooded"] += 1
            self.buffer.refuse(refused, REASON_FLOOD, sender)

    def _is_ordinary(self, topic: str) -> bool:
        """Whether `_arrived_ordinary` may take messages of a topic; positive answers are cached."""
        if topic in self._ordinary_topics:
            return True
        is_ordinary = _is_storable(topic) and topic != self.canary_topic and not _is_command(topic) and not is_control(topic)
        if not is_ordinary or self._mappings.has_items(topic) or self._belongs_to_others(topic) or not self._quota.knows(topic):
            return False
        if len(self._ordinary_topics) >= _ORDINARY_TOPICS:
            self._ordinary_topics.clear()
        self._ordinary_topics.add(topic)
        return True

    def arrived(self, message: Arrived, now_ms: int) -> None:
        """Take one message."""
        if message.retained:
            self._pass_over("retained", message.token)
        elif not self.live:
            self._history_line(message)
        elif message.topic == self.canary_topic and self._is_own_canary(message.payload):
            self._canary_returned(message, now_ms)
        elif self._sites and is_control(message.topic):
            self._pass_over("elsewhere", message.token)
        elif self._takes_commands and is_control(message.topic):
            self._command_of_program(message, now_ms)
        elif self._belongs_to_others(message.topic):
            self._pass_over("elsewhere", message.token)
        elif _is_command(message.topic):
            self._pass_over("commands", message.token)
        else:
            self._unusual(message, now_ms)

    def _command_of_program(self, message: Arrived, now_ms: int) -> None:
        """Take a message on a control topic: a command of a program, or a row of quarantine."""
        is_known, beyond = self._limits(message, now_ms)
        content = program_command(message.topic, message.payload) if is_known and beyond is None else None
        if content is None or isinstance(content, Rejection):
            self._limited_row(message, now_ms, is_known, beyond)
        else:
            self.program_commands.add(message, content)

    def _unusual(self, message: Arrived, now_ms: int) -> None:
        """Take one message as a row, with the limits of its device."""
        self._limited_row(message, now_ms, *self._limits(message, now_ms))

    def _limits(self, message: Arrived, now_ms: int) -> tuple[bool, str | None]:
        """Count a message once; return whether the quota admits its device, and its sender if that exceeds its limit."""
        if not self._quota.admits(message.topic, now_ms):
            return False, None
        return True, self._floods.exceeding((message.topic,), now_ms, (len(message.payload),)).get(0)

    def _limited_row(self, message: Arrived, now_ms: int, is_known: bool, beyond: str | None) -> None:
        """Take a counted message as a row, see `_limits`."""
        stamp, place, topic = self._stamp(now_ms), len(self.buffer), message.topic[:MAX_TOPIC]
        self._row(stamp, message.topic, message.payload, Origin.MQTT, token=message.token)
        if not is_known:
            self.counts["new_devices"] += 1
            self.buffer.refuse(place, REASON_NEW, EVERYONE)  # all new ids share the refused rows of a segment
        elif beyond is not None:
            self._refuse_flood(beyond, topic, message.payload, stamp, place)
        elif self.buffer.topic(place) != message.topic:  # a row of quarantine, whatever the payload
            self.buffer.senders[place] = self._floods.sender(message.topic)
        elif (rows := self._mappings.row_count(topic, message.payload)) > 1:
            self._floods.charge(topic, rows - 1)

    def _belongs_to_others(self, topic: str) -> bool:
        if not self._other_canaries:
            return False
        return topic in self._other_canaries or (topic.startswith("fleet/") and topic.split("/", 2)[1] in self.shared)

    def share(self, sites: frozenset[str]) -> None:
        """Hand sites over to other bridges that have subscribed to their messages.

        The handover takes effect when a canary that is sent from now on comes back. Messages
        published before it may have reached this bridge only; messages after it reach the other
        bridge.
        """
        requested = self._to_share[0] if self._to_share else self.shared
        if sites - requested:
            self._to_share = (requested | sites, self._sent)

    def promise(self, now_ms: int) -> int | None:
        """Return an instant before the ``received_at`` of every later row, for the lease.

        None while rows wait for their segment.
        """
        if self.buffer:
            return None
        if self.live:
            reached_ms = now_ms - 1 if self.last_ms is None else max(now_ms - 1, self.last_ms)
        elif self.last_ms is None:
            return None
        else:  # lines may share an instant; no row follows the end line before the bridge is live
            reached_ms = self.last_ms if self.history.done else self.last_ms - 1
        self.promised_ms = reached_ms if self.promised_ms is None else max(reached_ms, self.promised_ms)
        return self.promised_ms

    def _history_line(self, message: Arrived) -> None:
        for verdict, payload, envelope, token in self.history.take(message.payload, message.token, self.last_ms):
            if (verdict is LineAction.WRITE or verdict in REFUSED_LINES) and envelope is not None:
                self._write_line(envelope, token, REFUSED_LINES.get(verdict))
            elif verdict is LineAction.REPEATED:
                self._pass_over("repeated", token)
            elif verdict is LineAction.STRAY and self.history.under_way and self.last_ms is not None:
                # stamped like the line before it: the present time is later than the remaining lines
                where = {"recording": self.history.recording, "line": self.history.line}
                self._row(self.last_ms, message.topic, payload, Origin.MQTT, token=token, **where)
            else:
                self._reject(self.history.why or "not an envelope", token)

    def _write_line(self, envelope: Envelope, token: AckToken | None, refused: Reason | None) -> None:
        where = {"recording": envelope.recording, "line": envelope.line}
        if envelope.end:
            self._close_left_open(0)
            self._ask_for_verdicts()
            self._row(self.last_ms or 0, TOPIC_PREFIX + envelope.recording, b"", Origin.REPLAY, token=token, **where)
        else:
            assert envelope.received_at_ms is not None, "only the end line has no received_at"
            assert envelope.topic is not None, "only the end line has no topic"
            if envelope.line == 0:
                self._excuse_until(envelope.received_at_ms)
            self._quota.learn(envelope.topic)
            row = (envelope.received_at_ms, envelope.topic, envelope.payload, Origin.REPLAY)
            self._row(*row, token=token, refused=refused, **where)
        self.last_canary_ms = None

    def _excuse_until(self, first_ms: int) -> None:
        """Report the coverage gap between existing rows and the first line of a recording.

        If there is no room for two gap rows between them, nothing is reported.
        """
        if self.last_ms is None or first_ms - self.last_ms < 3:
            return
        self._open(first_ms - 2, "start", self.last_ms if self.last_canary_ms is None else self.last_canary_ms)
        self.gap_open = False
        self._gap(first_ms - 1, {"op": "close", "until": first_ms})

    def command(self, name: str, topic: str, payload: Mapping[str, Any], now_ms: int) -> None:
        """Take an operator's command; a flush is stamped as in `_ask_for_verdicts`.

        Commands about different devices may share an instant, so that the stamps of a million
        commands do not run ahead of the clock.
        """
        flushes = payload.get("op") == FLUSH
        self._quota.learn(topic)
        now_ms = self.last_ms if flushes and self.last_ms is not None else self._after_promise(now_ms)
        at_ms, devices = self._commanded
        levels = topic.split("/")
        device = levels[2] if len(levels) > 2 and not flushes else EVERYONE
        if device != EVERYONE and self.last_ms == at_ms >= now_ms and self._own_last and device not in devices:
            self._row(at_ms, topic, _json(payload), Origin.COMMAND, command=name)
            self._own_last = True
            devices.add(device)
            return
        self._own(now_ms, topic, payload, Origin.COMMAND, command=name)
        self._commanded = (self.last_ms or 0, {device}) if device != EVERYONE else (-1, set())

    def stopping(self) -> None:
        """Request delayed verdicts before a stop; a recording in progress continues later."""
        if self.live:
            self._ask_for_verdicts()

    def _ask_for_verdicts(self) -> None:
        """Write a tick that flushes delayed verdicts, stamped right after the newest row.

        The stamp is not the present time, as the tick does not prove that the bridge is listening.
        """
        if self._holds_back and self.last_ms is not None:
            self._own(self.last_ms, self.canary_topic, {"bridge": self.bridge, "op": FLUSH})

    # ---- canaries and gaps

    def canary(self, now_ms: int) -> bytes:
        """Return the payload of the next canary."""
        self._sent += 1
        text = f"{now_ms}-{self._sent}"
        nonce = f"{text}-{self._signature(text)}"
        self._canaries[nonce] = self._sent
        while len(self._canaries) > CANARIES:
            del self._canaries[next(iter(self._canaries))]
        return _json({"bridge": self.bridge, "nonce": nonce})

    def _signature(self, text: str) -> str:
        return hmac.new(self._secret, f"{self.bridge} {text}".encode(), hashlib.sha256).hexdigest()[:24]

    def _is_own_canary(self, payload: bytes) -> bool:
        text, _, signature = _nonce(payload).rpartition("-")
        return bool(text) and hmac.compare_digest(signature.encode(), self._signature(text).encode())

    def _canary_returned(self, message: Arrived, now_ms: int) -> None:
        number = self._canaries.pop(_nonce(message.payload), None)
        if number is None:
            self._pass_over("stale_canaries", message.token)
            return
        if self._to_share and number > self._to_share[1]:
            self.shared, self._to_share = self._to_share[0], None
            self._ordinary_topics.clear()
        self._own(now_ms, self.canary_topic, {"bridge": self.bridge})
        self.last_canary_ms, self._heard_ms = self.last_ms, now_ms
        if message.token is not None:
            self.buffer.passed.append(message.token)
        if self.gap_open and number > self._opened_at:
            self.gap_open = False
            assert self.last_ms is not None, "the tick was just added"
            self._gap(now_ms, {"op": "close", "until": max(now_ms, self.last_ms + 1) + self._grace_ms})

    def overdue(self, now_ms: int) -> bool:
        """Whether no canary has come back for more than two intervals and `SLACK_MS`."""
        self._heard_ms = min(self._heard_ms, now_ms)  # the wall clock may be set back
        return self.live and now_ms - self._heard_ms > 2 * self._interval_ms + SLACK_MS

    def open_gap(self, now_ms: int, why: str) -> None:
        """Open a coverage gap that starts when the last canary came back, unless a gap is open."""
        since_ms = self._since_ms if self.last_canary_ms is None else self.last_canary_ms
        if since_ms is not None:
            self._open(now_ms, why, since_ms)

    def _open(self, now_ms: int, why: str, since_ms: int) -> None:
        if not self.gap_open:
            self.gap_open = True
            # `after`: key groups without rows of their own need the position before the gap, too.
            scope = served_sites(self._sites, self.shared, takes_foreign=self._takes_foreign)
            self._gap(now_ms, {"op": "open", "from": since_ms, "after": self.last_ms, "why": why, **scope.to_plain()})
        self._opened_at = self._sent

    def _close_left_open(self, now_ms: int) -> None:
        """Close the coverage gaps that a finished recording left open; no later line closes them."""
        for bridge in self.history.let_go():
            if self.last_ms is not None and not (bridge == self.bridge and self.gap_open):
                self._gap(now_ms, {"op": "close", "until": max(now_ms, self.last_ms + 1)}, bridge)

    def _gap(self, now_ms: int, content: Mapping[str, Any], bridge: str | None = None) -> None:
        self._own(now_ms, f"fleet/{EVERYONE}/{bridge or self.bridge}/{Kind.GAP.value}", content)

    # ---- rows

    def _stamp(self, now_ms: int) -> int:
        now_ms = self._after_promise(now_ms)
        return now_ms if self.last_ms is None else max(now_ms, self.last_ms + self._own_last)

    def _after_promise(self, now_ms: int) -> int:
        return now_ms if self.promised_ms is None else max(now_ms, self.promised_ms + 1)

    def _own(
        self, now_ms: int, topic: str, content: Mapping[str, Any], origin: Origin = Origin.BRIDGE, command: str | None = None
    ) -> None:
        now_ms = self._after_promise(now_ms)
        received_at_ms = now_ms if self.last_ms is None else max(now_ms, self.last_ms + 1)
        self._row(received_at_ms, topic, _json(content), origin, command=command)
        self._own_last = True

    def _row(
        self, received_at_ms: int, topic: str, payload: bytes, origin: Origin, *, token: AckToken | None = None, **more: Any
    ) -> None:
        if not _is_storable(topic):  # applies to history, too
            topic, more["refused"] = ascii(topic[:MAX_TOPIC])[1:-1][:MAX_TOPIC], REASON_TOPIC
        self.buffer.add(SegmentRow(received_at_ms, topic, payload, origin.value, **more), token)
        self.last_ms, self._own_last = received_at_ms, False
        if self.live and self._since_ms is None:
            self._since_ms = received_at_ms

    def _pass_over(self, why: str, token: AckToken | None) -> None:
        self.counts[why] += 1
        if token is not None:
            self.buffer.passed.append(token)

    def _reject(self, why: str, token: AckToken | None) -> None:
        self.rejection = why
        self._pass_over("rejected", token)

    def written(self) -> list[AckToken]:
        """Reset the buffer after its segment is on disk; return the tokens to acknowledge."""
        tokens = [token for token in self.buffer.tokens if token is not None] + self.buffer.passed
        self.buffer, self._spared = SegmentBuffer(), SparedMessages()
        self._durable = self._memory()
        return tokens

    def _memory(self) -> tuple[int | None, int | None, bool, RecordingSequencer]:
        return self.last_ms, self.last_canary_ms, self.gap_open, self.history.copy()


def _is_storable(topic: str) -> bool:
    """Return whether a topic is short and printable, so that it can be stored unchanged."""
    fits = len(topic) <= MAX_TOPIC and topic.isprintable()
    return fits and (topic.isascii() or len(topic.encode()) <= MAX_TOPIC)


def _is_command(topic: str) -> bool:
    """Return whether a topic carries commands to devices, which are no messages of devices."""
    return is_for_device(topic) or is_command(topic)


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(content), separators=(",", ":")).encode()


def _nonce(payload: bytes) -> str:
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError):
        return ""
    nonce = cast("dict[str, Any]", content).get("nonce") if isinstance(content, dict) else None
    return nonce if isinstance(nonce, str) and nonce.isascii() else ""
