"""What is deployed by Compose and by systemd, as far as it can be seen without either: bound, limited, and without secrets."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.supervisor.airflow_env import environment as of_fleet_up
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import Service
from fleetpulse.paths import ROOT

INFRA = ROOT / "infra"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
UNITS = sorted((INFRA / "systemd").glob("*.service"))
OURS = tuple(service.value for service in Service)
ONCE = "airflow-init"
SECRET = re.compile(r"password|secret|key|token|conn$|_conn_|credential", re.IGNORECASE)


def variables(path: Path) -> dict[str, str]:
    """Return what a file of variables says."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def environment(service: dict[str, Any]) -> dict[str, str]:
    """Return what Compose puts into a container's environment."""
    found: dict[str, str] = {}
    for path in service.get("env_file", ()):
        found |= variables(ROOT / path)
    return found | service.get("environment", {})


def unit(path: Path) -> dict[str, list[str]]:
    """Return what a unit says, by key, its sections together."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_limited_and_may_do_little(name: str) -> None:
    service = SERVICES[name]
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert service["restart"] == ("on-failure:3" if name == ONCE else "unless-stopped")
    assert "privileged" not in service and "pid" not in service and "network_mode" not in service
    assert ("healthcheck" in service) == (name != ONCE), "who ends has nothing to be asked"
    assert re.fullmatch(r"[a-z]+:\d+\.\d+(\.\d+)?(-[a-z]+)?", service["image"]), "an image is pinned"


def test_every_port_is_published_on_the_loopback_alone() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert sorted(ports) == ["127.0.0.1:1883:1883", "127.0.0.1:8080:8080"]
    assert {name for name, service in SERVICES.items() if service["networks"] == ["database"]} == {"postgres", ONCE}
    telling = [f"airflow-{part}" for part in ("scheduler", "dag-processor", "triggerer")]
    assert all("line" in SERVICES[name]["networks"] for name in telling), "a failure is told to the broker and to a webhook"
    assert COMPOSE["networks"]["database"]["internal"] and COMPOSE["networks"]["inside"]["internal"]


def _named(kind: str) -> Iterator[str]:
    for service in SERVICES.values():
        for one in service.get(kind, ()):
            yield one["source"] if isinstance(one, dict) else one.partition(":")[0]


@pytest.mark.parametrize("kind", ["networks", "volumes", "secrets"])
def test_what_is_declared_is_used_and_what_is_used_is_declared(kind: str) -> None:
    assert set(_named(kind)) == set(COMPOSE[kind])


def test_no_secret_stands_in_an_environment() -> None:
    found: set[str] = set()
    for name, service in SERVICES.items():
        for variable, value in environment(service).items():
            if SECRET.search(variable) and variable != "AIRFLOW_CONN_SPARK_DEFAULT":
                assert variable.endswith(("_CMD", "_FILE")), f"{name}: {variable}"
                path = value.removeprefix("cat ")
                assert path.startswith(("/etc/fleetpulse/secrets/", "/run/secrets/", "/var/lib/fleetpulse/airflow/")), value
                if path.startswith("/etc"):
                    assert Path(path).name in COMPOSE["secrets"], value
                    found.add(variable)
    assert found
    assert all(set(one) == {"file"} for one in COMPOSE["secrets"].values())


def test_the_secrets_are_made_once_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "etc" / "secrets"
    command = [str(INFRA / "secrets" / "make"), str(folder), "db.example"]
    subprocess.run(command, check=True, capture_output=True)
    made = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(made) == {Path(one["file"]).name for one in COMPOSE["secrets"].values()}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o755, "who owns the folder has to reach it"
    assert made["airflow_database"] == f"postgresql+psycopg2://airflow:{made['postgres_password']}@db.example/airflow"
    users = variables(INFRA / "airflow.env")["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS"].split(",")
    assert {one.partition(":")[0] for one in users} == set(json.loads(made["airflow_passwords"]))
    assert len(set(made.values())) == len(made)
    assert made["webhook"] == "", "it is for whoever wants one"
    (folder / "webhook").write_text("https://chat.example/hook")
    made["webhook"] = "https://chat.example/hook"
    subprocess.run(command, check=True, capture_output=True)
    assert {path.name: path.read_text() for path in folder.iterdir()} == made


def test_airflow_is_set_up_as_fleet_up_sets_it_up(tmp_path: Path) -> None:
    of_up = of_fleet_up(Home(tmp_path / "home"), 8080)
    there = environment(SERVICES["airflow-scheduler"])
    drop_in = (INFRA / "systemd" / "fleetpulse-airflow-.service.d" / "20-airflow.conf").read_text()
    of_the_place = set(re.findall(r"^Environment=(\w+)", drop_in, re.MULTILINE))  # addresses: each place has its own
    assert of_the_place == set(SERVICES["airflow-scheduler"]["environment"])
    assert {name.removesuffix("_CMD") for name in there} == {*of_up, "FLEET_WEBHOOK_FILE"}  # up has it from the shell
    for name, value in of_up.items():
        if name in there and name not in of_the_place and name != "PYTHONPATH":
            value = value.replace(str(tmp_path / "home" / "airflow"), "/var/lib/fleetpulse/airflow")
            value = value.replace(str(tmp_path), "/var/lib/fleetpulse").replace(str(ROOT), "/opt/fleetpulse")
            assert there[name] == value, name


@pytest.mark.parametrize("name", OURS)
def test_what_a_container_runs_is_what_the_unit_runs_and_is_a_verb_of_ours(name: str) -> None:
    command = SERVICES[name]["command"]
    [line] = unit(INFRA / "systemd" / f"fleetpulse-{name}.service")["ExecStart"]
    assert line.split() == ["/opt/fleetpulse/fleet", *command[:4]]
    check = SERVICES[name]["healthcheck"]["test"]
    assert check[:2] == ["CMD", "/opt/fleetpulse/fleet"]
    assert check[2:] == [*command[:2], "--check", *command[2:4]]
    assert set(command) < {*Service, "service", "--home", "/var/lib/fleetpulse/home", "--listen", "0.0.0.0", "--known-as"}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_is_limited_and_runs_what_is_there(path: Path) -> None:
    said = unit(path)
    assert {"MemoryMax", "TasksMax"} <= set(said)
    program = ROOT / said["ExecStart"][0].split()[0].removeprefix("/opt/fleetpulse/")
    assert os.access(program, os.X_OK) or program == ROOT / ".venv/bin/python"
    container = path.stem.removeprefix("fleetpulse-")
    limits = SERVICES[container]["deploy"]["resources"]["limits"]
    assert (said["MemoryMax"], said["TasksMax"]) == ([limits["memory"].upper()], [str(limits["pids"])])
    if container.startswith("airflow-") and container != ONCE:
        assert said["ExecStart"][0].split()[4:] == SERVICES[container]["command"]


def test_every_part_is_wanted_by_a_target() -> None:
    wanted = {
        name for target in (INFRA / "systemd").glob("*.target") for names in unit(target)["Wants"] for name in names.split()
    }
    assert wanted == {path.name for path in UNITS} - {f"fleetpulse-{ONCE}.service"}


def test_every_part_stops_with_its_target() -> None:
    drop_ins = {path.parent.name.removesuffix(".service.d"): unit(path) for path in (INFRA / "systemd").glob("*/*.conf")}
    for target in (INFRA / "systemd").glob("*.target"):
        assert drop_ins[f"{target.stem}-"]["PartOf"] == [target.name]
    assert unit(INFRA / "systemd" / "fleetpulse-airflow.target")["PartOf"] == ["fleetpulse.target"]


def test_what_holds_for_airflow_alone_comes_after_what_holds_for_all() -> None:
    """Systemd takes the drop-ins of a unit in the order of their file names, whichever folders they lie in; the last one wins."""
    drop_ins = sorted((INFRA / "systemd").glob("fleetpulse-*.service.d/*.conf"), key=lambda path: path.name)
    assert [path.parent.name for path in drop_ins] == ["fleetpulse-.service.d", "fleetpulse-airflow-.service.d"]
    wins: dict[str, list[str]] = {}
    for path in drop_ins:
        wins |= {key: values for key, values in unit(path).items() if key in ("WorkingDirectory", "TimeoutStopSec")}
    assert wins == {"WorkingDirectory": ["/var/lib/fleetpulse/airflow"], "TimeoutStopSec": ["120"]}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    units = tmp_path / "units"
    shutil.copytree(INFRA / "systemd", units)
    for path in units.rglob("*.*"):
        if path.is_file():
            text = path.read_text().replace("/opt/fleetpulse/.venv/bin/python", sys.executable)
            path.write_text(text.replace("/opt/fleetpulse", str(ROOT)))
    every = [str(path) for path in units.iterdir() if path.is_file()]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *every],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:"},  # and after ours the system's own
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    newer = re.compile(r"Unknown key.*'(RestartSteps|RestartMaxDelaySec)'")  # of systemd 254
    faults = [line for line in done.stderr.splitlines() if str(units) in line and not newer.search(line)]
    assert (done.returncode, faults) == (0, [])


def test_the_image_has_what_it_copies_and_is_nobodys_who_may_change_it() -> None:
    lines = (INFRA / "images" / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied and all((ROOT / word).exists() for word in copied)
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert not {word.partition("/")[0] for word in copied} & set(ignored)
    assert "infra/secrets" in ignored
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["10001:10001"]
    assert [line for line in lines if line.startswith("FROM ")] == ["FROM python:3.11.13-slim-bookworm"]


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compose's own reader of its files, built of `infra/check`."""
    if shutil.which("go") is None:
        pytest.skip("there is no Go to build Compose's reader with")
    program = tmp_path_factory.mktemp("go") / "check"
    command = ["go", "build", "-mod=readonly", "-o", str(program), "."]
    built = subprocess.run(command, cwd=INFRA / "check", capture_output=True, text=True, timeout=280, check=False)
    if "dial tcp" in built.stderr or "lookup" in built.stderr:
        pytest.skip("the modules of Compose's reader cannot be fetched")
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.extended
def test_compose_reads_it_as_we_do(loader: Path) -> None:
    done = subprocess.run([loader, ROOT / "docker-compose.yml"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)["services"]
    assert set(read) == set(SERVICES)
    for name, service in SERVICES.items():
        assert read[name].get("environment", {}) == environment(service), name
        assert read[name]["command"] == service.get("command"), name


@pytest.mark.extended
@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("networks: [inside]", "networks: [outside]"),
        ("home:/var/lib/fleetpulse/home", "house:/var/lib/fleetpulse/home"),
        ("source: airflow_jwt", "source: airflow_token"),
        ("broker: { condition: service_healthy }", "brooker: { condition: service_healthy }"),
        ("1883:1883", "${PORT?}:1883"),
    ],
)
def test_compose_refuses_what_dangles(loader: Path, tmp_path: Path, now: str, then: str) -> None:
    shutil.copytree(INFRA, tmp_path / "infra")
    text = (ROOT / "docker-compose.yml").read_text()
    assert now in text
    (tmp_path / "docker-compose.yml").write_text(text.replace(now, then, 1))
    done = subprocess.run([loader, tmp_path / "docker-compose.yml"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, then
