"""``fleet listen``: recent and arriving messages, each with its result.

Rule 1: On arrival, the result is predicted from covered time, with the same code as the replay. It
is printed again when the frontier has passed the message.
Rule 2: Observing has no side effects: the command has its own MQTT session, acknowledges only the
copies of that session, and keeps at most `REMEMBERED` pending messages in memory.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import typer

from cli.common.output import as_json, as_shown, console
from cli.common.policy_files import load_mappings
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import clock_fault
from fleetpulse.core.messages.decode import Rejection
from fleetpulse.core.messages.mapping import Mappings, rows_of
from fleetpulse.core.messages.sparkplug import PREFIX
from fleetpulse.core.policy import Policies, Rules
from fleetpulse.core.presence.coverage import ShardProgress
from fleetpulse.core.presence.identities import DeviceIdentity, identified
from fleetpulse.core.presence.presence_time import FAULTS, classify_event_time, offset_ms, with_presence_time
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import EVERYONE, SIGNALS, Identity, Kind, Origin, Row, Trust, identity
from fleetpulse.core.signals import proves_alive
from fleetpulse.core.streams.commands import is_for_device
from fleetpulse.core.times import MINUTE_MS, format_duration, format_instant
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.home.home import BRIDGE, Home
from fleetpulse.io.home.services import in_use
from fleetpulse.io.mqtt.address import load_address
from fleetpulse.io.mqtt.sparkplug.codec import decode_any
from fleetpulse.io.mqtt.subscriber import Arrived, Receiver
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.settings import load_settings

REMEMBERED: Final = 1_000  # maximum number of pending messages that are tracked until they are judged
CANARY: Final = f"fleet/{EVERYONE}/{BRIDGE}/{Kind.TICK.value}"
EVERYTHING: Final = "#"
_AT_RECEIVED: Final = "its received_at"
_ASK_S: Final = 1.0  # interval between reads of the checkpoint's progress
_COVERAGE_S: Final = 5.0  # interval between reads of coverage gaps


@dataclass(frozen=True, slots=True)
class MessageResult:
    """Result of one message.

    Attributes:
        state: keyword for programs: judged, waiting (pending), late, duplicate, unjudged,
            quarantined, foreign, ignored, history, retained, canary, command.
        text: sentence for people.
    """

    state: str
    text: str


@dataclass(frozen=True, slots=True)
class PrintedMessage:
    """A message as it is printed.

    Attributes:
        received_at_ms: instant at which it arrived, epoch milliseconds.
        topic: MQTT topic.
        payload: first 200 bytes of the payload, as text.
        row: decoded row; None if the message was not decoded.
    """

    received_at_ms: int
    topic: str
    payload: str
    row: Row | None = None


def predict_result(
    shown: PrintedMessage, shards: Shards | None, deployment: Deployment, rules_of: Callable[[Row], Rules] = lambda _: Rules()
) -> tuple[PrintedMessage, MessageResult]:
    """Predict the result of a decoded message on arrival.

    Args:
        shown: decoded message.
        shards: coverage according to the landed rows; None if there are none.
        deployment: limits for lateness, clock lead and backlog.
        rules_of: function that returns the rules for the device of a late message.

    Returns:
        The message with its presence time, and its result as known on arrival.
    """
    assert shown.row is not None, "only a decoded message is judged"
    listening = (shards or Shards.begin(shown.received_at_ms)).of(shown.row.site)
    listening = listening.read(shown.received_at_ms, deployment.allowed_lateness_ms)
    row = read_with(shown.row, listening.frontier_ms, deployment)
    return replace(shown, row=row), _predicted(row, listening, deployment, rules_of)


def _predicted(row: Row, listening: ShardProgress, deployment: Deployment, rules_of: Callable[[Row], Rules]) -> MessageResult:
    if row.trust is Trust.LATE and listening.frontier_ms is not None and row.event_time_ms is not None:
        late_by = format_duration(listening.frontier_ms - row.event_time_ms)
        counts = "as a sign of life" if proves_alive(row, rules_of(row)) else "after ./fleet amend"
        return MessageResult("late", f"late by {late_by}: behind the frontier; it counts only {counts}")
    fault = f"{clock_fault(row.trust, offset_ms(row))}, so it is judged at {_AT_RECEIVED}; " if row.trust in FAULTS else ""
    due_ms = listening.due_at(row.at_ms, deployment.allowed_lateness_ms)
    if due_ms is None:
        return MessageResult("waiting", f"{fault}pending: a coverage gap is open; nothing is judged until it is closed")
    return MessageResult("waiting", f"{fault}pending: will be judged at about {format_instant(due_ms)}")


def read_with(row: Row, frontier_ms: int | None, deployment: Deployment) -> Row:
    """Return a message with the presence time that the lifecycle job gives it."""
    if row.kind not in SIGNALS:
        return row
    return with_presence_time(row, classify_event_time(row, frontier_ms, deployment.max_clock_lead_ms, deployment.max_backlog_ms))


def read_message(
    message: Arrived,
    now_ms: int,
    mappings: Mappings,
    *,
    sparkplug: bool = False,
    identified_by: DeviceIdentity = DeviceIdentity.ID,
) -> list[tuple[PrintedMessage, MessageResult | None]]:
    """Decode a message as the landing does.

    Args:
        message: message as delivered by the broker.
        now_ms: instant of delivery, epoch milliseconds.
        mappings: mappings of the home.
        sparkplug: whether the fleet accepts Sparkplug.
        identified_by: fields that identify a device.

    Returns:
        The message, and its result if that does not depend on the frontier; otherwise None. A mapped
        message has an entry for each of its rows.
    """
    shown = PrintedMessage(now_ms, message.topic, message.payload[:200].decode(errors="backslashreplace"))
    if message.topic.startswith("replay/"):
        return [(shown, MessageResult("history", "history: accepted only by a bridge that replays a recording"))]
    prefixes = ("fleet/", PREFIX) if sparkplug else ("fleet/",)
    if not message.topic.startswith(prefixes) and not mappings.match(message.topic):
        advice = "use a topic below fleet/, or add a mapping (fleet map test)"
        if message.topic.startswith(PREFIX):
            advice = "to accept Sparkplug: ./fleet map add sparkplug"
        return [(shown, MessageResult("foreign", f"ignored: no bridge accepts this topic; {advice}"))]
    if message.retained:
        return [(shown, MessageResult("retained", "a retained copy: not a signal"))]
    if message.topic == CANARY:
        return [(shown, MessageResult("canary", "canary of the bridge: the bridge is listening"))]
    if is_for_device(message.topic):
        return [(shown, MessageResult("command", "a command to the device: ./fleet commands"))]
    rows = rows_of(decode_any(mappings, message.topic, message.payload, now_ms, Origin.MQTT))
    if not rows:
        return [(shown, MessageResult("ignored", "ignored: the mapping does not take this message as one of a device"))]
    return [_read_row(shown, row, identified_by) for row in rows]


def _read_row(
    shown: PrintedMessage, row: Row | Rejection, identified_by: DeviceIdentity
) -> tuple[PrintedMessage, MessageResult | None]:
    if isinstance(row, Rejection):
        return shown, MessageResult("quarantined", f"quarantined ({row.reason}): {row.detail}")
    return replace(shown, row=identified(row, identified_by)), None


class PendingMessages:
    """Printed messages that are pending; beyond ``limit``, the oldest one is dropped.

    Args:
        limit: maximum number of messages.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._waiting: dict[Identity, PrintedMessage] = {}
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, shown: PrintedMessage) -> bool:
        """Track a message; return False if it is a copy of a tracked one."""
        assert shown.row is not None, "only a decoded message is pending"
        key = identity(shown.row)
        if key in self._waiting:
            return False
        self._waiting[key] = shown
        if len(self._waiting) > self._limit:
            del self._waiting[next(iter(self._waiting))]
            self.forgotten += 1
        return True

    def pop_judged(self, frontier_of: Callable[[str], int | None]) -> list[PrintedMessage]:
        """Remove and return the messages that the frontier has passed.

        They are returned in order of presence time.

        Args:
            frontier_of: function that returns the frontier of a site.
        """
        instants = {
            key: shown.row.at_ms for key, shown in self._waiting.items() if shown.row and is_judged(shown.row, frontier_of)
        }
        due = sorted(instants, key=instants.__getitem__)
        return [self._waiting.pop(key) for key in due]


def is_judged(row: Row, frontier_of: Callable[[str], int | None]) -> bool:
    """Whether the frontier of a message's site has reached the message."""
    frontier_ms = frontier_of(row.site)
    return frontier_ms is not None and row.at_ms <= frontier_ms


def verdicts(
    passed: Iterable[PrintedMessage], judgements: Iterable[dict[str, Any]]
) -> list[tuple[PrintedMessage, MessageResult]]:
    """Return the results of messages that the frontier has passed.

    Args:
        passed: messages that the frontier has passed.
        judgements: judgements about them, as `judgements.judgements_about` returns them.
    """
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    sums = [one for one in judgements if one["kind"] != "duplicate" and one["messages"] is not None]
    for judgement in judgements:
        key = (judgement["device_id"], judgement["message_kind"], judgement["event_time_ms"], judgement["seq"])
        found.setdefault(key, []).append(judgement)
    results: list[tuple[PrintedMessage, MessageResult]] = []
    for shown in passed:
        row = shown.row
        about = found.get((row.device_id, row.kind.value, row.event_time_ms, row.seq), []) if row else []
        results.append((shown, _summed(row, sums) if row and sums and not about else _verdict(about)))
    return results


def _summed(row: Row, sums: Iterable[Mapping[str, Any]]) -> MessageResult:
    """Return the result of a message without its own judgement; a row for several messages may include it."""
    for one in sums:
        same = (one["device_id"], one["message_kind"]) == (row.device_id, row.kind.value)
        minute = one["received_at_ms"] // MINUTE_MS == row.received_at_ms // MINUTE_MS
        if same and minute and one["event_time_ms"] <= (row.event_time_ms or 0) <= one["event_time_until_ms"]:
            state = {"late": "late", "clock": "judged"}.get(one["kind"], "unjudged")
            kind = one["kind"].replace("_", " ")
            return MessageResult(state, f"{kind}, or judged without a mode change; {one['reason']}, without rows of their own")
    return _verdict([])


def _verdict(about: list[dict[str, Any]]) -> MessageResult:
    moved = [f"{one['from_mode']} -> {one['to_mode']} ({one['trigger']})" for one in about if one["kind"] == "transition"]
    if moved:
        return MessageResult("judged", f"judged: {', '.join(moved)}")
    for one in about:
        if one["kind"] == "late":
            return MessageResult("late", f"late by {format_duration(one['late_by_ms'] or 0)}: {one['reason']}")
        if one["kind"] == "clock":
            return MessageResult("judged", f"judged at {_AT_RECEIVED}, because {one['reason']}: no mode change")
        if one["kind"] != "duplicate":  # a duplicate judgement is about a copy; the first message was judged
            return MessageResult("unjudged", f"not judged, {one['kind'].replace('_', ' ')}: {one['reason']}")
    return MessageResult("judged", "judged: no mode change")


class Listener:
    """Printer of messages and their results.

    Args:
        home: home of the fleet.
        topic: MQTT topic filter.
        json_lines: whether to print one JSON object a line, for programs.
    """

    def __init__(self, home: Home, topic: str, *, json_lines: bool) -> None:
        self.home, self.topic, self.json_lines = home, topic, json_lines
        self.deployment, self.mappings = home.deployment(), load_mappings(home)
        self._sparkplug = bool(load_settings(home.path).sparkplug_host)
        self._identity = home.identity()
        self.followed = PendingMessages()
        self._console = console()
        self._judged_ms: int | None = None
        self._asked_s = self._covered_s = float("-inf")
        self._shards: Shards | None = None
        self._policies: Policies | None = None  # read for the first late message after coverage gaps were read
        self._rules: dict[str, Rules] = {}  # by device, from these policies
        self._reported_forgotten = 0

    def show_earlier(self, last: int, before_ms: int) -> None:
        """Show the last messages that landed before this command subscribed."""
        from fleetpulse.reports import frontiers, judgements

        landed: list[PrintedMessage] = []
        for one in judgements.recent(self.home, last, before_ms):
            shown = PrintedMessage(one["received_at_ms"], one["topic"], one["payload"], one["row"])
            if one["row"] is None:
                self._print(shown, MessageResult("quarantined", f"quarantined ({one['reason']}): {one['detail']}"))
            else:
                landed.append(replace(shown, row=read_with(one["row"], None, self.deployment)))
        frontier_of = frontiers.frontier_of_sites(self.home, judged_ms(self.home.checkpoint))
        known = [one for one in landed if one.row and is_judged(one.row, frontier_of)]
        for shown, result in verdicts(known, judgements.judgements_about(self.home, [one.row for one in known if one.row])):
            self._print(shown, result)
        for shown in landed:
            if shown not in known:
                self._print_prediction(shown)

    def show_message(self, message: Arrived) -> None:
        """Show an arriving message."""
        if message.topic == CANARY and self.topic == EVERYTHING:
            return  # the bridge publishes it every few seconds
        now_ms = wall_clock_ms()
        for shown, known in read_message(message, now_ms, self.mappings, sparkplug=self._sparkplug, identified_by=self._identity):
            if known is not None:
                self._print(shown, known)
            else:
                self._print_prediction(shown)

    def _print_prediction(self, shown: PrintedMessage) -> None:
        from fleetpulse.reports import frontiers

        if time.monotonic() - self._covered_s > _COVERAGE_S:
            self._shards, self._covered_s = frontiers.shards(self.home, None), time.monotonic()
            self._policies = None
            self._rules.clear()
        shown, known = predict_result(shown, self._shards, self.deployment, self._rules_of)
        if known.state == "waiting" and not self.followed.add(shown):
            known = MessageResult("duplicate", "a copy of a pending message: only the first one counts")
        self._print(shown, known)

    def _rules_of(self, row: Row) -> Rules:
        """Return the rules for the device of a late message; its class is read only if some class has late rules."""
        from fleetpulse.reports.effective_policy import evaluation_context, rules_in

        if self._policies is None:
            known = evaluation_context(self.home, None)
            self._policies = Policies() if known is None else known.policies
        policy = self._policies.at(row.received_at_ms).policy
        if not policy.has_late_rules:
            return policy.rules
        if row.device_id not in self._rules:
            self._rules[row.device_id] = rules_in(self.home, policy, row.device_id, row.received_at_ms)[1]
        return self._rules[row.device_id]

    def follow(self) -> None:
        """Show pending messages again after they have been judged."""
        if not self.followed or time.monotonic() - self._asked_s < _ASK_S:
            return
        self._asked_s = time.monotonic()
        judged = judged_ms(self.home.checkpoint)
        if judged is None or judged == self._judged_ms:
            return
        from fleetpulse.reports import frontiers, judgements

        self._judged_ms = judged
        passed = self.followed.pop_judged(frontiers.frontier_of_sites(self.home, judged))
        if passed:
            for shown, result in verdicts(passed, judgements.judgements_about(self.home, [one.row for one in passed if one.row])):
                self._print(shown, result, again=True)
        if self.followed.forgotten > self._reported_forgotten:
            self._reported_forgotten = self.followed.forgotten
            typer.echo(
                f"fleet: more than {REMEMBERED} messages are pending; {self._reported_forgotten} will not be shown again",
                err=True,
            )

    def _print(self, shown: PrintedMessage, result: MessageResult, *, again: bool = False) -> None:
        if self.json_lines:
            line = {"received_at_ms": shown.received_at_ms, "topic": shown.topic, "payload": shown.payload}
            as_json([{**line, "state": result.state, "fate": result.text}])
            return
        out = self._console
        at = format_instant(shown.received_at_ms)[11:23]
        payload = "" if again else f"  {as_shown(shown.payload)}"
        out.print(f"{at}  {as_shown(shown.topic)}{payload}", markup=False, highlight=False, soft_wrap=True)
        text, style = f"              -> {as_shown(result.text)}", _STYLES.get(result.state)
        out.print(text, markup=False, highlight=False, soft_wrap=True, style=style)


_STYLES: Final = {
    "judged": "green",
    "waiting": "cyan",
    "late": "yellow",
    "duplicate": "yellow",
    "unjudged": "yellow",
    "quarantined": "red",
    "foreign": "bright_black",
    "ignored": "bright_black",
}


def listen(home: Home, topic: str, for_s: float, last: int, *, json_lines: bool) -> None:
    """Show messages until the time is over or Ctrl-C is pressed.

    Raises:
        FleetError: nothing runs in the home, or the broker refuses the connection.
    """
    if not in_use(home):
        raise FleetError(
            f'cannot listen: nothing runs in "{home.path}"; start it with: ./fleet up --home {home.path} '
            f"(earlier messages: ./fleet devices, late, quarantine)",
            code="home-not-running",
        )
    address = load_address(home.run("broker"))
    receiver = Receiver(address, f"fleet-listen-{secrets.token_hex(8)}", (topic,), persistent=False)
    listener = Listener(home, topic, json_lines=json_lines)
    limit = time.monotonic() + for_s
    problem, heard = None, False
    try:
        while time.monotonic() < limit:
            arrived = receiver.poll(0.2)
            if receiver.connected and not heard:  # new messages are queued from now on, so there is time for earlier ones
                heard = True
                typer.echo(f"fleet: listening to {topic} on {address}; press Ctrl-C to stop", err=True)
                if last and topic == EVERYTHING:
                    listener.show_earlier(last, wall_clock_ms())
            for message in arrived:
                listener.show_message(message)
                receiver.ack([message.token])
            listener.follow()
            if receiver.problem != problem:
                problem = receiver.problem
                if problem:
                    typer.echo(f"fleet: {problem}; retrying", err=True)
    except KeyboardInterrupt:
        return
    finally:
        receiver.close()
