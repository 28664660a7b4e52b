"""Replays and live fleets through the whole pipeline, with kills and repeated commands."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import psutil
import pytest

from cli.supervisor.progress import judged_to_the_end
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import FLUSH
from fleetpulse.core.times import format_instant, parse_instant_ms
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest import recording
from fleetpulse.reports import messages
from streaming.simulator.scenario import Scenario, scenario_policy
from tests.support.fleet_command import await_none_left, begin, fleet, left_running, rows_of
from tests.support.form import IS_DEFAULT
from tests.support.histories.definition import defined_judgements, emitted_judgements, require_equal_to_definition
from tests.support.histories.histories import START
from tests.support.histories.presence_cases import CASES
from tests.support.histories.presence_cases import rows_of as rows_of_cases
from tests.support.histories.recordings import NEEDS_RECORDED_FLEET, RECORDED_FLEET, record, record_rows
from tests.support.wait import PATIENCE_S, await_that

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]  # each step has its own, shorter limit
# The default suite kills the job in the middle of its work; each further victim costs a start of Spark.
VICTIMS = ("lifecycle",) if IS_DEFAULT else ("bridge", "lifecycle", "landing", "broker", "the command")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recording of a simulated fleet, which includes invalid payloads."""
    scenario = Scenario(3, 30, START, history_ms=150 * 60_000)
    return record(tmp_path_factory.mktemp("recording") / "fleet.ndjson.gz", scenario)


def test_a_replay_killed_anywhere_gives_the_same_verdicts_when_it_is_repeated(recorded: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    policy = tmp_path / "policy.toml"
    classes = "".join(f'[classes.{name}]\ntimeout = "{one["timeout"]}"\n' for name, one in scenario_policy()["classes"].items())
    policy.write_text('[rules]\ntimeout = "60m"\n' + classes)
    command = ("replay", str(recorded), "--home", str(home), "--policy", str(policy), "--lateness", "1m")
    for victim in VICTIMS:
        running = begin(*command)
        _kill(running, Home(home), victim)
        output, _ = running.communicate(timeout=PATIENCE_S)
        if victim != "the command":
            assert running.returncode == 1, output
            assert "run the same command again" in output, output
        await_none_left(home)
    running = begin(*command)
    await_that(lambda: _pid(Home(home), "lifecycle") is not None, limit_s=PATIENCE_S, what="the lifecycle job")
    asked = fleet("down", "--home", str(home))
    assert asked.returncode == 0, asked.stderr
    assert not left_running(home), "down also waits for the jobs of a replay"
    assert running.wait(20) == 128 + signal.SIGTERM, running.communicate()[0]
    done = fleet(*command)
    assert done.returncode == 0, done.stderr
    want = defined_judgements(recorded, scenario_policy(), 60_000)
    assert {one[4] for one in want} >= {"online", "offline", "degraded", "flagged", "decommissioned"}
    assert emitted_judgements(home) == want
    assert rows_of("quarantine", "--json", "--home", str(home))
    assert rows_of("late", "--json", "--home", str(home))
    again = fleet(*command)
    assert again.returncode == 0, again.stderr
    assert emitted_judgements(home) == want
    refused = fleet("replay", str(recorded), "--home", str(home), "--timeout", "5m", "--lateness", "1m")
    assert refused.returncode == 1
    assert "already judges this recording" in refused.stderr
    await_none_left(home)


@pytest.mark.extended
def test_a_replay_with_jitter_gives_the_same_verdicts_and_a_stop_delays_none(recorded: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "settings.toml").write_text('verdict_jitter = "2h"\n')
    done = fleet("replay", str(recorded), "--home", str(home), "--timeout", "10m", "--lateness", "1m")
    assert done.returncode == 0, done.stderr
    want = defined_judgements(recorded, {"rules": {"timeout": "10m"}}, 60_000)
    assert sum(one[5] == "silence" for one in want) > 5
    assert emitted_judgements(home) == want
    done = fleet("up", "--home", str(home), "--no-sim", "--no-airflow", "--no-page", "--port", "0", "--for", "20")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "not flushed" not in done.stderr
    assert judged_to_the_end(Home(home))
    flushes = [one for one in messages.rows(Home(home)) if one.contents().get("op") == FLUSH]
    assert len(flushes) == 2, "one at the end of the recording, one at the stop"
    await_none_left(home)


def _kill(running: subprocess.Popen[str], home: Home, victim: str) -> None:
    """Kill one process with SIGKILL once it runs; the lifecycle job, once it has started its first batch."""
    limit = time.monotonic() + 90
    while time.monotonic() < limit and running.poll() is None:
        pid = running.pid if victim == "the command" else _pid(home, victim)
        started = home.checkpoint / "offsets" / "0" if victim in ("lifecycle", "the command") else home.run("bridge")
        if pid is not None and started.exists():
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)
    pytest.fail(f"{victim} never ran: {running.communicate()[0]}")


def _pid(home: Home, name: str) -> int | None:
    suffix = {"broker": "nats-server"}.get(name, name)
    for process in psutil.process_iter(["cmdline"]):
        cmdline = process.info["cmdline"] or []
        if any(str(home.path) in argument for argument in cmdline) and any(argument.endswith(suffix) for argument in cmdline):
            return process.pid
    return None


def _heartbeats(path: Path, day: int, devices: dict[str, int]) -> str:
    """Write a recording of one heartbeat a minute; ``devices`` maps each device to its number of minutes."""
    instants = [
        (START + day * 86_400_000 + minute * 60_000, one) for one, minutes in devices.items() for minute in range(minutes)
    ]
    lines = (
        json.dumps({"received_at_ms": ms, "topic": f"fleet/site/{one}/heartbeat", "payload": {"ts": ms}})
        for ms, one in sorted(instants)
    )
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def played_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home with two replayed recordings; the second is of a day later, and has its own policy."""
    folder = tmp_path_factory.mktemp("played")
    home = folder / "home"
    first = _heartbeats(folder / "first.ndjson", 0, {"steady": 10, "quiet": 10})
    second = _heartbeats(folder / "second.ndjson", 1, {"steady": 20})
    assert fleet("replay", first, "--home", str(home), "--lateness", "1m").returncode == 0
    assert fleet("replay", second, "--home", str(home), "--lateness", "1m", "--timeout", "5m").returncode == 0
    return home


@pytest.mark.extended
def test_a_later_recording_has_its_own_policy_and_time_in_between_is_no_silence(played_twice: Path) -> None:
    rows = rows_of("transitions", "--json", "--home", str(played_twice))
    assert [one["to_mode"] for one in rows if one["device_id"] == "steady"] == ["online"]
    online, offline = (one for one in rows if one["device_id"] == "quiet")
    assert offline["to_mode"] == "offline"
    assert offline["event_time"] > format_instant(START + 86_400_000)
    assert online["policy_version"] != offline["policy_version"]


@pytest.mark.extended
def test_a_home_with_newer_rows_refuses_an_older_recording(played_twice: Path, tmp_path: Path) -> None:
    older = _heartbeats(tmp_path / "older.ndjson", 1, {"another": 1})
    refused = fleet("replay", older, "--home", str(played_twice))
    assert refused.returncode == 1
    assert "expected a recording that starts later" in refused.stderr


def page_of(running: "subprocess.Popen[str]") -> tuple[SplitResult, str]:
    """Log in with the one-time address that a run prints; return the address of the page, and the session."""
    assert running.stdout is not None
    line = next(line for line in running.stdout if line.startswith("page:"))
    address = urlsplit(line.split()[1])

    def answer() -> HTTPResponse | None:
        connection = HTTPConnection(str(address.hostname), address.port, timeout=60)
        try:
            connection.request("GET", f"{address.path}?{address.query}")
        except ConnectionRefusedError:
            return None
        return connection.getresponse()

    found = await_that(answer, by=running, what="the page")
    assert found is not None and found.status == 303
    return address, str(found.headers["Set-Cookie"]).partition(";")[0]


def devices_on_page(address: SplitResult, session: str) -> int:
    """Return the number of devices with a mode, from the server of a page."""
    connection = HTTPConnection(str(address.hostname), address.port, timeout=60)
    connection.request("GET", "/api/v1/fleet", headers={"Cookie": session})
    return sum(json.loads(connection.getresponse().read())["devices"].values())


def test_up_judges_a_simulated_fleet_stops_cleanly_and_resumes(tmp_path: Path) -> None:
    home = tmp_path / "home"
    began_ms = time.time_ns() // 1_000_000
    running = begin("up", "--home", str(home), "--devices", "20", "--no-airflow", "--page-port", "0", "--port", "0")
    page = page_of(running)

    def is_up_to_date() -> bool:
        reached = judged_up_to(Home(home).checkpoint) if Home(home).exists() else None
        return reached is not None and reached[1] > began_ms + 15_000

    await_that(is_up_to_date, by=running)
    assert devices_on_page(*page) > 5
    running.terminate()
    output, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0, output
    await_none_left(home)
    modes = Counter(one["mode"] for one in rows_of("devices", "--json", "--home", str(home)))
    assert modes["online"] > 5
    assert modes["offline"] >= 1
    require_equal_to_definition(Home(home))
    assert fleet("device", "add", "new-device", "--class", "meter", "--home", str(home)).returncode == 0
    again = fleet("up", "--home", str(home), "--no-sim", "--no-airflow", "--no-page", "--port", "0", "--for", "25")
    assert again.returncode == 0, again.stderr + again.stdout
    assert "mosquitto_pub" in again.stdout
    assert any(one["device_id"] == "new-device" for one in rows_of("devices", "--json", "--home", str(home)))
    require_equal_to_definition(Home(home))
    shown = rows_of("device", "sensor-00000", "--home", str(home), "--json")[0]
    assert shown["due_offline_at"]
    assert shown["judged_up_to"]
    await_none_left(home)


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("replay", "missing.gz"), 1, 'there is no recording "missing.gz"'),
        (("status",), 1, "there is no fleet in"),
        (("up", "--broker", "http://x"), 1, "mqtt://host:port"),
        (("up", "--devices", "0"), 2, ""),
        (("device", "maintain", "d"), 2, "--for or --until"),
        (("replay", "x", "--lateness", "10ms"), 2, "at least 1s"),
        (("policy", "check", "missing.toml"), 1, "cannot be read"),
    ],
)
def test_an_impossible_command_fails_with_a_clear_error(
    arguments: tuple[str, ...], code: int, error: str, tmp_path: Path
) -> None:
    more = () if arguments[0] == "policy" else ("--home", str(tmp_path / "home"))
    done = fleet(*arguments, *more)
    assert done.returncode == code, done.stderr
    assert error in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.extended
@NEEDS_RECORDED_FLEET
def test_the_recorded_fleet_is_judged_correctly(tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = fleet("replay", str(RECORDED_FLEET), "--home", str(home), "--timeout", "60m", "--lateness", "5m")
    assert done.returncode == 0, done.stderr
    emitted = emitted_judgements(home)
    modes = Counter(one[4] for one in emitted.elements())
    assert (modes["online"], modes["offline"]) == (5_342, 5_339)
    assert len({one[0] for one in emitted}) == 374
    assert len(rows_of("late", "--json", "--home", str(home))) == 20
    assert emitted == defined_judgements(RECORDED_FLEET, {"rules": {"timeout": "60m"}}, 300_000)


@pytest.mark.extended
@NEEDS_RECORDED_FLEET
@pytest.mark.parametrize(
    ("lateness_ms", "devices", "online", "offline", "late"),
    [(3_600_000, 374, 5_342, 5_339, 0), (300_000, 374, 5_342, 5_339, 20), (30_000, 374, 5_341, 5_338, 166)],
)
def test_the_definition_equals_an_independent_count_of_the_recorded_fleet(
    lateness_ms: int, devices: int, online: int, offline: int, late: int
) -> None:
    judged = replay(recording.rows(RECORDED_FLEET), Deployment(lateness_ms))
    modes = Counter(str(one.to_mode) for one in judged)
    assert (modes["online"], modes["offline"]) == (online, offline)
    assert len({one.device_id for one in judged if one.kind == "transition"}) == devices
    assert sum(one.kind == "late" for one in judged) == late


@pytest.mark.extended
def test_inputs_from_the_field_are_judged_correctly_as_one_recording(tmp_path: Path) -> None:
    cases = CASES
    played = record_rows(tmp_path / "presence.ndjson.gz", rows_of_cases([*cases.values()]))
    home = tmp_path / "home"
    done = fleet("replay", str(played), "--home", str(home), "--lateness", "1m")
    assert done.returncode == 0, done.stderr
    found: dict[str, list[tuple[float, str, str, str]]] = {}
    for one in rows_of("transitions", "--json", "--home", str(home)):
        at_s = (parse_instant_ms(one["event_time"]) - START) / 1000
        found.setdefault(one["device_id"], []).append((at_s, one["from_mode"], one["to_mode"], one["trigger"]))
    listed = Counter((one["device_id"], one["kind"]) for one in rows_of("late", "--kind", "all", "--json", "--home", str(home)))
    for name, case in cases.items():
        for device_id, want in case.want.items():
            assert [one for one in found.get(device_id, []) if one[0] <= case.until_s] == list(want), (name, device_id)
        for (device_id, verdict), count in case.listed.items():
            assert listed[device_id, verdict.value] == count, (name, device_id)
    devices = {one["device_id"]: one for one in rows_of("devices", "--json", "--home", str(home))}
    assert {one for case in cases.values() for one in case.want} <= {*devices}, "no device is missing because of its clock"
    assert devices["c1"]["clock"] == "10m ahead" and devices["c2"]["clock"] == "not set"
    assert [one for one in devices if devices[one]["never_seen"]] == ["o6"]
    status = rows_of("status", "--json", "--home", str(home))[0]
    assert status["never_seen"] == 1 and status["clocks"]["ahead"] >= 1
