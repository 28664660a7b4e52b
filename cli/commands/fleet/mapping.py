"""``fleet map``: add, test and watch mappings."""

import json
import secrets
import stat
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, JsonOption
from cli.common.output import as_json, as_shown, console, report_progress
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.messages.decode import Rejection
from fleetpulse.core.messages.mapping import Mappings, has_space, rows_of
from fleetpulse.core.messages.sparkplug import PREFIX
from fleetpulse.core.rows import Clock, Origin, Row
from fleetpulse.core.times import format_instant, parse_duration_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest import profiles
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.system.wall_clock import wall_clock_ms

MAX_PATTERNS: Final = 1_000  # patterns that `map watch` counts; further topics are counted together
_EVERYTHING: Final = "#"
_OWN: Final = ("fleet/", "fleetpulse/", "replay/", PREFIX, "$")
_POLL_S: Final = 0.2
_SPARKPLUG_HOST: Final = "fleetpulse"  # host id for homes without one
_FIELDS: Final = ("site", "gateway", "boot", "session", "seq", "uptime_s", "code", "firmware", "metrics", "note")

mapping = typer.Typer(no_args_is_help=True, help="Add, test and watch mappings for devices with their own topics and payloads.")
FileArgument = Annotated[Path, typer.Argument(help="Mapping file.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(mapping, name="map")


@mapping.command("add")
def add(
    profile: Annotated[str, typer.Argument(help="Profile of a product or platform; fleet map list shows all.")],
    site: Annotated[str, typer.Option("--site", help="Site of the devices; Sparkplug nodes are at their group.")] = "home",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Add the rules of a profile to the mapping file of a home; for Sparkplug, set sparkplug_host."""
    from cli.common.policy_files import read_mappings

    opened = Home(home)
    opened.record()
    if profile == profiles.SPARKPLUG:
        _accept_sparkplug(opened)
        return
    text = profiles.read_profile(profile, site)
    known = opened.mapping.read_text() if opened.mapping.exists() else ""
    if profiles.heading(profile) in known.splitlines():
        raise FleetError(
            f'the profile "{profile}" is in "{opened.mapping}" already; edit it there, or remove its rules first',
            code="profile-present",
        )
    new = opened.mapping.with_name("mapping.toml.new")
    new.write_text("\n".join(part for part in (known.rstrip("\n"), text) if part))
    try:
        mappings = read_mappings(new)
    finally:
        content = new.read_bytes()
        new.unlink()
    atomic_write(opened.mapping, content)
    count = len(mappings.rules)
    typer.echo(f'"{opened.mapping}" has {count} rules; broker, bridge and landing read them when they start (./fleet up)')
    _note_spaces(mappings)


def _note_spaces(mappings: Mappings, topics: Iterable[str] = ()) -> None:
    """Print a note for each rule and topic with a space."""
    from cli.common.policy_files import spaces_note

    patterns = mappings.patterns_with_spaces()
    rules = [f'the topic "{one}" of a rule' for one in patterns]
    others = [f'the topic "{one}"' for one in topics if has_space(one) and one not in patterns]
    for what in dict.fromkeys(rules or others[:1]):
        typer.echo(as_shown(f"fleet: note: {spaces_note(what)}"), err=True)


def _accept_sparkplug(home: Home) -> None:
    """Set the Sparkplug host id in the settings of a home, if none is set."""
    from fleetpulse.settings import load_settings

    file = home.path / "settings.toml"
    if host := load_settings(home.path).sparkplug_host:
        typer.echo(f'Sparkplug is accepted already: sparkplug_host is "{host}"')
        return
    known = file.read_text() if file.exists() else ""
    if "sparkplug_host" in tomllib.loads(known):
        raise FleetError(
            f'sparkplug_host in "{file}" is empty, which accepts no Sparkplug; write sparkplug_host = "{_SPARKPLUG_HOST}" there',
            code="sparkplug-off",
        )
    mode = stat.S_IMODE(file.stat().st_mode) if file.exists() else 0o666  # the file may hold passwords
    atomic_write(file, f'sparkplug_host = "{_SPARKPLUG_HOST}"\n{known}', mode=mode)  # at the top: before any table
    typer.echo(f'"{file}" has sparkplug_host = "{_SPARKPLUG_HOST}"; the bridge reads it at the next start (./fleet up)')
    typer.echo("grant access to a node with: ./fleet access grant NAME --sparkplug GROUP/NODE")


@mapping.command("list")
def show_profiles(json_lines: JsonOption = False) -> None:
    """List the profiles: ready mappings for products and platforms."""
    names = sorted((*profiles.names(), profiles.SPARKPLUG))
    found = [{"profile": name, "about": profiles.about(name)} for name in names]
    if json_lines:
        as_json(found)
        return
    width = max(len(one["profile"]) for one in found)
    for one in found:
        typer.echo(f"{one['profile']:<{width}}  {one['about']}")


@mapping.command("test")
def try_mapping(
    file: FileArgument,
    topic: Annotated[str | None, typer.Argument(help="Topic, as published by the device.")] = None,
    payload: Annotated[str | None, typer.Argument(help="Payload, as published by the device.")] = None,
    messages: Annotated[
        Path | None,
        typer.Option("--messages", help="File with one message a line: JSON with topic and payload (mosquitto_sub -F %j)."),
    ] = None,
    json_lines: JsonOption = False,
) -> None:
    """Show the rows that a mapping file makes of messages, or why there is none."""
    from cli.common.policy_files import read_mappings

    mappings = read_mappings(file)
    if messages is not None and topic is None:
        given = list(_read_messages(messages))
    elif messages is None and topic is not None and payload is not None:
        given = [(topic, payload.encode())]
    else:
        raise Misuse("name a topic and a payload, or a file of messages (--messages)", code="map-test-input")
    results = [explain(mappings, one, content, wall_clock_ms()) for one, content in given]
    if json_lines:
        as_json([one.as_json() for one in results])
    else:
        for one in results:
            for line in one.lines():
                typer.echo(as_shown(line))
    _note_spaces(mappings, (one for one, _ in given))
    faults = [one for one in results if one.fault]
    if faults:
        raise FleetError(
            f'{len(faults)} of {len(results)} messages would not be judged; the first: topic "{faults[0].topic}": '
            f"{faults[0].fault}; correct the mapping",
            code="mapping-faults",
        )


def _read_messages(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f'"{path}" cannot be read ({error}); name a file of messages', code="file-unreadable") from None
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
            topic, payload = one["topic"], one["payload"]
        except (ValueError, KeyError, TypeError):
            raise FleetError(
                f'line {number} of "{path}" must be a JSON object with topic and payload; got {line[:80]!a}',
                code="messages-invalid",
            ) from None
        yield str(topic), payload.encode() if isinstance(payload, str) else json.dumps(payload).encode()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Result of a mapping for one message.

    Attributes:
        topic: topic of the message.
        rule: number of the rule that takes it, from 1; None if no rule takes it.
        pattern: pattern of that rule.
        rows: decoded rows.
        fault: reason why the message, or a part of it, is not judged; empty if all of it is judged or
            ignored.
    """

    topic: str
    rule: int | None
    pattern: str | None
    rows: tuple[Row, ...]
    fault: str = ""

    def lines(self) -> Iterator[str]:
        """Yield lines for people."""
        yield f"topic    {self.topic}"
        if self.rule is None:
            yield f"result   {self.fault or 'ignored: no rule takes this payload'}"
            return
        yield f"rule     {self.rule}: {self.pattern}"
        for row in self.rows:
            yield f"row      {row.device_id}  {row.kind}  {_event(row)}"
            for name in _FIELDS:
                value = getattr(row, name)
                if value is not None:
                    yield f"         {name} = {value}"
        if self.fault or not self.rows:
            yield f"result   {self.fault or 'ignored: the rule takes the message and makes no row'}"

    def as_json(self) -> dict[str, Any]:
        """Return the result for programs."""
        rows = [
            {
                "device_id": row.device_id,
                "kind": row.kind,
                "event_time_ms": row.event_time_ms,
                "clock": row.clock,
                **{name: getattr(row, name) for name in _FIELDS},
            }
            for row in self.rows
        ]
        return {"topic": self.topic, "rule": self.rule, "pattern": self.pattern, "rows": rows, "fault": self.fault or None}


def _event(row: Row) -> str:
    if row.event_time_ms is None:
        return "no event time"
    clock = "time of receipt" if row.clock is Clock.RECEIVED else "clock of the device"
    return f"{format_instant(row.event_time_ms)} ({clock})"


def explain(mappings: Mappings, topic: str, payload: bytes, now_ms: int) -> Explanation:
    """Decode a message, and name the rule that takes it.

    Args:
        mappings: the mappings.
        topic: topic of the message.
        payload: bytes of the message.
        now_ms: time of receipt, epoch milliseconds.
    """
    matched = mappings.match(topic)
    if not matched:
        return Explanation(topic, None, None, (), "no rule matches this topic; add one")
    taken = mappings.taken_by(matched, payload)
    if taken is None:
        return Explanation(topic, None, None, ())
    decoded = rows_of(mappings.decode(topic, payload, now_ms, Origin.MQTT))
    rows = tuple(one for one in decoded if isinstance(one, Row))
    faults = [f"quarantined ({one.reason}): {one.detail}" for one in decoded if isinstance(one, Rejection)]
    faults += [f"listed but not judged: {row.note}" for row in rows if row.event_time_ms is None]
    return Explanation(topic, mappings.rules.index(taken[0]) + 1, taken[0].pattern, rows, "; ".join(faults))


@dataclass
class Watch:
    """Numbers of messages at a broker, by the rule that takes them.

    Attributes:
        mappings: mappings of the home.
        candidates: rules of all profiles, by name of the profile.
        taken: number of messages by pattern of the rule that takes them.
        others: number of messages that no rule takes, by pattern of the topic and proposal.
        uncounted: number of messages beyond the first `MAX_PATTERNS` entries of ``others``.
    """

    mappings: Mappings
    candidates: dict[str, Mappings]
    taken: dict[str, int] = field(default_factory=dict[str, int])
    others: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    uncounted: int = 0

    def add(self, topic: str, payload: bytes) -> str | None:
        """Count a message; return a line if it is the first of its rule or topic."""
        if topic.startswith(_OWN) and not topic.startswith("$aws/"):
            return None
        taken = self.mappings.taken_by(self.mappings.match(topic), payload)
        if taken is not None:
            pattern = taken[0].pattern
            self.taken[pattern] = self.taken.get(pattern, 0) + 1
            return f"taken      {topic}  by the rule {pattern}" if self.taken[pattern] == 1 else None
        key = (_shape(topic), self.proposal(topic, payload))
        if key not in self.others and len(self.others) >= MAX_PATTERNS:
            self.uncounted += 1
            return None
        self.others[key] = self.others.get(key, 0) + 1
        return f"not taken  {topic}  {key[1]}" if self.others[key] == 1 else None

    def proposal(self, topic: str, payload: bytes) -> str:
        """Return a proposal for a topic that no rule takes."""
        if self.mappings.match(topic):
            return "a rule matches the topic, but its condition excludes the payload"
        for name, candidate in self.candidates.items():
            if candidate.taken_by(candidate.match(topic), payload) is not None:
                return f"try: ./fleet map add {name}"
        return f'try a rule with topic = "{_shape(topic)}"'

    def as_json(self) -> list[dict[str, Any]]:
        """Return the counts for programs."""
        taken = [{"taken": True, "topics": pattern, "messages": count} for pattern, count in self.taken.items()]
        others = [
            {"taken": False, "topics": shape, "messages": count, "proposal": proposal}
            for (shape, proposal), count in self.others.items()
        ]
        return [*taken, *others]


def _shape(topic: str) -> str:
    """Return a pattern for a topic: the device is its second level, or its first if it is short.

    A topic is short if it has at most two levels, and no leading slash.
    """
    levels = topic.split("/")
    levels[1 if len(levels) > 2 or levels[0] == "" else 0] = "{device}"
    return "/".join(levels)


@mapping.command("watch")
def watch(
    for_: Annotated[str, typer.Option("--for", help="How long to watch.")] = "1m",
    home: HomeOption = DEFAULT_HOME,
    json_lines: JsonOption = False,
) -> None:
    """Watch all topics of the broker: which are taken, by which rule, and what to do about others."""
    from cli.common.policy_files import load_mappings
    from fleetpulse.io.home.services import in_use
    from fleetpulse.io.mqtt.address import load_address

    opened, for_s = Home(home), parse_duration_ms(for_) / 1_000
    opened.record()
    if not in_use(opened):
        raise FleetError(
            f'cannot watch: nothing runs in "{home}"; start it with: ./fleet up --home {home}', code="home-not-running"
        )
    watching = Watch(load_mappings(opened), {name: profiles.load_profile(name) for name in profiles.names()})
    address = load_address(opened.run("broker"))
    report_progress(f"fleet: watching all topics on {address} for {for_}; press Ctrl-C to stop")
    for topic, payload in _received(address, for_s):
        line = watching.add(topic, payload)
        if line and not json_lines:
            console().print(as_shown(line), markup=False, highlight=False, soft_wrap=True)
    if json_lines:
        as_json(watching.as_json())
        return
    typer.echo(f"{sum(watching.taken.values())} messages are taken, by {len(watching.taken)} rules")
    typer.echo(f"{sum(watching.others.values()) + watching.uncounted} messages are not taken")


def _received(address: Any, for_s: float) -> Iterator[tuple[str, bytes]]:
    """Yield the messages of a broker until the time is over or Ctrl-C is pressed."""
    from fleetpulse.io.mqtt.subscriber import Receiver

    receiver = Receiver(address, f"fleet-map-{secrets.token_hex(8)}", (_EVERYTHING,), persistent=False)
    limit, problem = time.monotonic() + for_s, None
    try:
        while time.monotonic() < limit:
            for message in receiver.poll(_POLL_S):
                yield message.topic, message.payload
                receiver.ack([message.token])
            if receiver.problem != problem:
                problem = receiver.problem
                if problem:
                    report_progress(f"fleet: {problem}; retrying")
    except KeyboardInterrupt:
        return
    finally:
        receiver.close()
