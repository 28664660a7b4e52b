"""`fleet map`: explanations of messages, watched topics, and profiles added to a home."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.commands.fleet.mapping import MAX_PATTERNS, Watch, _received, explain
from cli.common.policy_files import load_mappings, require_no_spaces
from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest import profiles
from fleetpulse.io.ingest.payload_paths import compile_path
from fleetpulse.io.mqtt import subscriber
from fleetpulse.settings import load_settings
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
NOW = 1_700_000_000_000
RULES = parse_mappings(
    {
        "mapping": [
            {"topic": "a/{device}", "site": "h", "kind": "telemetry", "ts": "t", "when": "type(@) == 'object'"},
            {"topic": "p/{device}", "site": "h", "kind": {"values": {"on": "birth"}}},
        ]
    },
    compile_path,
)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["map", *arguments])


@pytest.mark.parametrize(
    ("topic", "payload", "rule", "rows", "fault"),
    [
        ("a/d", b'{"t": 1700000000000}', 1, 1, ""),
        ("a/d", b'{"t": 17}', 1, 1, "listed but not judged: ts must be"),
        ("a/d", b"21.5", None, 0, ""),
        ("a/" + "d" * 200, b"{}", 1, 0, "quarantined (topic)"),
        ("p/d", b"on", 2, 1, ""),
        ("p/d", b"off", 2, 0, ""),
        ("x/d", b"{}", None, 0, "no rule matches this topic"),
    ],
)
def test_a_message_is_explained(topic: str, payload: bytes, rule: int | None, rows: int, fault: str) -> None:
    found = explain(RULES, topic, payload, NOW)
    assert (found.rule, len(found.rows)) == (rule, rows)
    assert found.fault.startswith(fault) and bool(found.fault) is bool(fault)
    assert list(found.lines()) and json.dumps(found.as_json())


def test_watching_connects_with_a_client_id_that_others_cannot_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with the same client id would replace the connection."""
    ids = list[str]()

    class Silent:
        def __init__(self, _address: object, client_id: str, _topics: object, **_: object) -> None:
            ids.append(client_id)

        def close(self) -> None: ...

    monkeypatch.setattr(subscriber, "Receiver", Silent)
    assert [*_received(None, 0), *_received(None, 0)] == []
    assert len({*ids}) == 2 and all(len(one) >= 16 for one in ids)


def test_watched_topics_are_counted_by_rule_or_with_a_proposal() -> None:
    watch = Watch(RULES, {"tasmota": profiles.load_profile("tasmota")})
    assert watch.add("a/d", b"{}") == "taken      a/d  by the rule a/{device}"
    assert watch.add("a/e", b"{}") is None
    assert "condition excludes" in str(watch.add("a/d", b"7"))
    assert "./fleet map add tasmota" in str(watch.add("tele/plug/LWT", b"Online"))
    assert 'topic = "x/{device}/z"' in str(watch.add("x/y/z", b"{}"))
    assert watch.add("x/w/z", b"{}") is None
    assert watch.add("fleet/s/d/heartbeat", b"{}") is None
    counted = {one["topics"]: one["messages"] for one in watch.as_json()}
    assert counted == {"a/{device}": 2, "{device}/d": 1, "tele/{device}/LWT": 1, "x/{device}/z": 2}
    for number in range(MAX_PATTERNS):
        watch.add(f"invented/{number}/{number}", b"{}")
    assert len(watch.others) == MAX_PATTERNS and watch.uncounted == 3


def test_messages_of_a_file_are_explained(tmp_path: Path) -> None:
    mapping, messages = tmp_path / "mapping.toml", tmp_path / "messages.ndjson"
    mapping.write_text('[[mapping]]\ntopic = "a/{device}"\nsite = "h"\nkind = "telemetry"\n')
    messages.write_text('{"topic": "a/d", "payload": "21.5", "qos": 0}\n{"topic": "a/e", "payload": {"t": 1}}\n')
    done = run("test", str(mapping), "--messages", str(messages), "--json")
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["rows"][0]["metrics"] for line in done.output.splitlines()] == ['{"value":21.5}', '{"t":1}']
    messages.write_text('{"topic": "a/d"}\n')
    assert run("test", str(mapping), "--messages", str(messages)).exit_code == 1
    assert run("test", str(mapping)).exit_code == 1


def test_a_profile_is_added_to_a_home_once(home: Home) -> None:
    assert run("add", "tasmota", "--site", "hall", "--home", str(home.path)).exit_code == 0
    content = home.mapping.read_text()
    assert 'site = "hall"' in content and "SITE" not in content
    again = run("add", "tasmota", "--home", str(home.path))
    assert again.exit_code == 1 and home.mapping.read_text() == content
    for arguments in (("add", "nothing"), ("add", "tasmota", "--site", "a/b")):
        assert run(*arguments, "--home", str(home.path)).exit_code == 1
    assert list(home.path.glob("mapping.toml.*")) == []


def test_sparkplug_is_accepted_by_a_setting(home: Home) -> None:
    file = home.path / "settings.toml"
    file.write_text('# of the hall\n[kafka]\ntopics = ["a"]\n"bootstrap.servers" = "h:1"\n')
    file.chmod(0o600)
    for _ in range(2):
        done = run("add", "sparkplug", "--home", str(home.path))
        assert done.exit_code == 0 and "sparkplug_host" in done.output, done.output
    settings = load_settings(home.path)
    assert (settings.sparkplug_host, settings.kafka["topics"]) == ("fleetpulse", "a")
    assert file.read_text().count("sparkplug_host") == 1 and "# of the hall" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert not home.mapping.exists()


def test_an_empty_sparkplug_host_is_left_to_its_owner(home: Home) -> None:
    file = home.path / "settings.toml"
    file.write_text('sparkplug_host = ""\n')
    assert run("add", "sparkplug", "--home", str(home.path)).exit_code == 1
    assert file.read_text() == 'sparkplug_host = ""\n'


def test_all_profiles_are_listed() -> None:
    listed = [json.loads(line)["profile"] for line in run("list", "--json").output.splitlines()]
    assert listed == sorted((*profiles.names(), "sparkplug"))


def test_a_topic_with_a_space_gets_a_note_and_stops_a_bridge_at_the_embedded_broker(home: Home) -> None:
    home.mapping.write_text('[[mapping]]\ntopic = "living room/{device}"\nsite = "h"\nkind = "telemetry"\n')
    for done in (run("test", str(home.mapping), "living room/d", "1"), run("add", "tasmota", "--home", str(home.path))):
        assert done.exit_code == 0, done.output
        assert done.stderr.count("has a space") == 1 and "rename the topic" in done.stderr and "--broker" in done.stderr
    with refused("mapping-space", match="living room/{device}.*--broker.*remove the rule"):
        require_no_spaces(home.mapping, load_mappings(home))
    home.mapping.write_text('[[mapping]]\ntopic = "+/{device}"\nsite = "h"\nkind = "telemetry"\n')
    require_no_spaces(home.mapping, load_mappings(home))
    assert "has a space" in run("test", str(home.mapping), "living room/d", "1").stderr, "its messages are refused, too"
