"""Deployment files of Compose and systemd: limits, networks, secrets and commands."""

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

from cli.supervisor.airflow_env import environment as fleet_up_environment
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import Service
from fleetpulse.paths import ROOT
from fleetpulse.settings import Settings, load_settings

INFRA = ROOT / "infra"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
CLUSTER: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.cluster.yml").read_text())
ON_CLUSTER: dict[str, dict[str, Any]] = {name: one for name, one in CLUSTER["services"].items() if name not in SERVICES}
DRIVERS = {name: one for name, one in CLUSTER["services"].items() if name in SERVICES}
UNITS = sorted((INFRA / "systemd").glob("*.service"))
JOBS = tuple(service.value for service in Service)
INIT_SERVICE = "airflow-init"
SECRET = re.compile(r"password|secret|key|token|conn$|_conn_|credential", re.IGNORECASE)


def variables(path: Path) -> dict[str, str]:
    """Return the variables of an environment file."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def environment(service: dict[str, Any]) -> dict[str, str]:
    """Return the environment that Compose gives to a container."""
    found: dict[str, str] = {}
    for path in service.get("env_file", ()):
        found |= variables(ROOT / path)
    return found | service.get("environment", {})


def unit(path: Path) -> dict[str, list[str]]:
    """Return the values of a unit by key, for all sections together."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("name", [*SERVICES, *ON_CLUSTER])
def test_a_container_has_limits_and_few_privileges(name: str) -> None:
    service = SERVICES.get(name) or ON_CLUSTER[name]
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert service["restart"] == ("on-failure:3" if name == INIT_SERVICE else "unless-stopped")
    assert "privileged" not in service and "pid" not in service and "network_mode" not in service
    assert ("healthcheck" in service) == (name != INIT_SERVICE), "a service that ends needs no health check"
    assert re.fullmatch(r"fleetpulse:\d+\.\d+\.\d+|[a-z]+:[\w.-]+@sha256:[0-9a-f]{64}", service["image"]), "an image is pinned"


def test_every_port_is_published_on_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert sorted(ports) == ["127.0.0.1:1883:1883", "127.0.0.1:8080:8080", "127.0.0.1:8090:8090"]
    assert {name for name, service in SERVICES.items() if service["networks"] == ["database"]} == {"postgres", INIT_SERVICE}
    senders = [f"airflow-{part}" for part in ("scheduler", "dag-processor", "triggerer")]
    assert all("line" in SERVICES[name]["networks"] for name in senders), "they send failures to the broker and to a webhook"
    assert COMPOSE["networks"]["database"]["internal"] and COMPOSE["networks"]["inside"]["internal"]


def _named(kind: str) -> Iterator[str]:
    for service in SERVICES.values():
        for one in service.get(kind, ()):
            yield one["source"] if isinstance(one, dict) else one.partition(":")[0]


@pytest.mark.parametrize("kind", ["networks", "volumes", "secrets"])
def test_declared_and_used_networks_volumes_and_secrets_are_equal(kind: str) -> None:
    assert set(_named(kind)) == set(COMPOSE[kind])


def test_no_environment_contains_a_secret() -> None:
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


def _start_of_a_daemon(folder: Path, defaults: str) -> "subprocess.CompletedProcess[str]":
    """Start a Spark daemon without a Python, so that it ends behind its check of the configuration."""
    (folder / "spark-defaults.conf").write_text(defaults)
    environment = {"PATH": os.environ["PATH"], "SPARK_CONF_DIR": str(folder), "FLEET_PYTHON": "/none/bin/python"}
    command = [str(INFRA / "spark" / "daemon"), "worker", "spark://127.0.0.1:9"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_secrets_are_generated_once_and_accessible_to_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "etc" / "secrets"
    command = [str(INFRA / "secrets" / "make"), str(folder), "db.example"]
    subprocess.run(command, check=True, capture_output=True)
    secrets = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(secrets) == {Path(one["file"]).name for one in {**COMPOSE["secrets"], **CLUSTER["secrets"]}.values()}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o755, "the owner of the folder must be able to reach it"
    assert secrets["airflow_database"] == f"postgresql+psycopg2://airflow:{secrets['postgres_password']}@db.example/airflow"
    users = variables(INFRA / "airflow.env")["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS"].split(",")
    assert {one.partition(":")[0] for one in users} == set(json.loads(secrets["airflow_passwords"]))
    assert len(set(secrets.values())) == len(secrets)
    assert secrets["webhook"] == "", "the webhook is optional"
    defaults = dict(line.split(" ", 1) for line in secrets["spark_defaults"].splitlines())
    assert defaults["spark.authenticate.secret"] == secrets["spark_key"]
    assert defaults["spark.master.rest.enabled"] == "false", "it accepts jobs without the secret"
    for number, line in enumerate(lines := secrets["spark_defaults"].splitlines(keepends=True)):
        if "cipher" not in line:
            refused = _start_of_a_daemon(tmp_path, "".join(one for other, one in enumerate(lines) if other != number))
            assert refused.returncode == 1
            assert "has no line that matches spark." in refused.stderr
    assert "none/bin/python" in _start_of_a_daemon(tmp_path, "".join(lines)).stderr, "the file is accepted"
    (folder / "webhook").write_text("https://chat.example/hook")
    secrets["webhook"] = "https://chat.example/hook"
    subprocess.run(command, check=True, capture_output=True)
    assert {path.name: path.read_text() for path in folder.iterdir()} == secrets


def test_deployed_airflow_has_the_environment_of_fleet_up(tmp_path: Path) -> None:
    expected = fleet_up_environment(Home(tmp_path / "home"), 8080)
    deployed = environment(SERVICES["airflow-scheduler"])
    drop_in = (INFRA / "systemd" / "fleetpulse-airflow-.service.d" / "20-airflow.conf").read_text()
    local_names = set(re.findall(r"^Environment=(\w+)", drop_in, re.MULTILINE))  # addresses, which differ between deployments
    assert local_names == set(SERVICES["airflow-scheduler"]["environment"])
    from_shell = {"FLEET_WEBHOOK_FILE", "FLEET_APPROVERS"}  # ./fleet up gets them from the shell
    assert (expected.pop("FLEET_SELF_APPROVAL"), deployed.pop("FLEET_SELF_APPROVAL")) == ("yes", "no")
    assert {name.removesuffix("_CMD") for name in deployed} == {*expected, *from_shell}
    for name, value in expected.items():
        if name in deployed and name not in local_names and name != "PYTHONPATH":
            value = value.replace(str(tmp_path / "home" / "airflow"), "/var/lib/fleetpulse/airflow")
            value = value.replace(str(tmp_path), "/var/lib/fleetpulse").replace(str(ROOT), "/opt/fleetpulse")
            assert deployed[name] == value, name


def test_the_cluster_is_reached_by_its_drivers_alone() -> None:
    assert not [name for name, one in ON_CLUSTER.items() if "ports" in one or one["networks"] != ["inside"]]
    assert all("inside" in SERVICES[name]["networks"] for name in DRIVERS)
    assert CLUSTER["name"] == COMPOSE["name"]
    assert {one["image"] for one in ON_CLUSTER.values()} == {"fleetpulse:0.1.0"}


def test_a_restarted_master_keeps_its_sessions() -> None:
    options = ON_CLUSTER["spark-master"]["environment"]["SPARK_MASTER_OPTS"].split()
    assert "-Dspark.deploy.recoveryMode=FILESYSTEM" in options, "it would give the running sessions no more executors"


@pytest.mark.parametrize("name", DRIVERS)
def test_sessions_of_two_drivers_fit_into_the_workers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = DRIVERS[name]["environment"]
    for variable, value in chosen.items():
        monkeypatch.setenv(variable, value)
    settings = load_settings(tmp_path)
    assert len({"FLEET_" + field.upper() for field in Settings.model_fields} & set(chosen)) == len(chosen), "each is a setting"
    master, worker = ON_CLUSTER["spark-master"]["command"], ON_CLUSTER["spark-worker"]["command"]
    host, port = (master[master.index(option) + 1] for option in ("--host", "--port"))
    assert worker[-1] == settings.spark_master == f"spark://{host}:{port}"
    assert settings.spark_key in [secret["target"] for secret in DRIVERS[name]["secrets"]]
    workers = ON_CLUSTER["spark-worker"]["deploy"]["replicas"]
    assert 2 * settings.task_cores <= workers * int(worker[worker.index("--cores") + 1])
    heap_gb = int(settings.executor_memory.removesuffix("g"))
    assert 2 * settings.executors * heap_gb <= workers * int(worker[worker.index("--memory") + 1].removesuffix("g"))
    assert ON_CLUSTER["spark-worker"]["volumes"] == SERVICES["lifecycle"]["volumes"], "at the path of the driver"


@pytest.mark.parametrize(
    ("part", "defaults", "code"), [("", "", 2), ("driver", "", 2), ("master", "spark.authenticate true\n", 1)]
)
def test_a_part_of_the_cluster_needs_a_secret(part: str, defaults: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(defaults)
    environment = {"PATH": os.environ["PATH"], "SPARK_CONF_DIR": str(tmp_path)}
    command = [str(INFRA / "spark" / "daemon"), part]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == code
    assert ("infra/secrets/make" if code == 1 else "usage") in result.stderr


@pytest.mark.parametrize("name", JOBS)
def test_the_container_and_the_unit_of_a_service_run_the_same_command(name: str) -> None:
    command = SERVICES[name]["command"]
    [line] = unit(INFRA / "systemd" / f"fleetpulse-{name}.service")["ExecStart"]
    assert line.split() == ["/opt/fleetpulse/fleet", *command[:4]]
    check = SERVICES[name]["healthcheck"]["test"]
    assert check[:2] == ["CMD", "/opt/fleetpulse/fleet"]
    assert check[2:] == [*command[:2], "--check", *command[2:4]]
    assert set(command) < {
        *Service,
        "service",
        "--home",
        "/var/lib/fleetpulse/home",
        "--listen",
        "0.0.0.0",
        "--plain",
        "--known-as",
    }


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_has_limits_and_runs_an_existing_program(path: Path) -> None:
    values = unit(path)
    assert {"MemoryMax", "TasksMax"} <= set(values)
    program = ROOT / values["ExecStart"][0].split()[0].removeprefix("/opt/fleetpulse/")
    assert os.access(program, os.X_OK) or program == ROOT / ".venv/bin/python"
    container = path.stem.removeprefix("fleetpulse-")
    limits = SERVICES[container]["deploy"]["resources"]["limits"]
    assert (values["MemoryMax"], values["TasksMax"]) == ([limits["memory"].upper()], [str(limits["pids"])])
    if container.startswith("airflow-") and container != INIT_SERVICE:
        assert values["ExecStart"][0].split()[4:] == SERVICES[container]["command"]


def test_every_unit_is_wanted_by_a_target() -> None:
    wanted = {
        name for target in (INFRA / "systemd").glob("*.target") for names in unit(target)["Wants"] for name in names.split()
    }
    assert wanted == {path.name for path in UNITS} - {f"fleetpulse-{INIT_SERVICE}.service"}


def test_every_unit_stops_with_its_target() -> None:
    drop_ins = {path.parent.name.removesuffix(".service.d"): unit(path) for path in (INFRA / "systemd").glob("*/*.conf")}
    for target in (INFRA / "systemd").glob("*.target"):
        assert drop_ins[f"{target.stem}-"]["PartOf"] == [target.name]
    assert unit(INFRA / "systemd" / "fleetpulse-airflow.target")["PartOf"] == ["fleetpulse.target"]


def test_drop_ins_for_airflow_override_those_for_all_units() -> None:
    """Systemd applies the drop-ins of a unit in the order of file names, across folders; the last one wins."""
    drop_ins = sorted((INFRA / "systemd").glob("fleetpulse-*.service.d/*.conf"), key=lambda path: path.name)
    assert [path.parent.name for path in drop_ins] == ["fleetpulse-.service.d", "fleetpulse-airflow-.service.d"]
    wins: dict[str, list[str]] = {}
    for path in drop_ins:
        wins |= {key: values for key, values in unit(path).items() if key in ("WorkingDirectory", "TimeoutStopSec")}
    assert wins == {"WorkingDirectory": ["/var/lib/fleetpulse/airflow"], "TimeoutStopSec": ["120"]}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    units = tmp_path / "units"
    shutil.copytree(INFRA / "systemd", units)
    for path in units.rglob("*.*"):
        if path.is_file():
            text = path.read_text().replace("/opt/fleetpulse/.venv/bin/python", sys.executable)
            path.write_text(text.replace("/opt/fleetpulse", str(ROOT)))
    every = [str(path) for path in units.iterdir() if path.is_file()]
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *every],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:"},  # the system's own units follow these
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    newer = re.compile(r"Unknown key.*'(RestartSteps|RestartMaxDelaySec)'")  # keys of systemd 254
    faults = [line for line in result.stderr.splitlines() if str(units) in line and not newer.search(line)]
    assert (result.returncode, faults) == (0, [])


def test_the_image_copies_existing_files_and_runs_as_an_unprivileged_user() -> None:
    lines = (INFRA / "images" / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert not {name.partition("/")[0] for name in copied} & set(ignored)
    assert "infra/secrets" in ignored
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["10001:10001"]
    [base] = [line for line in lines if line.startswith("FROM ")]
    assert re.fullmatch(r"FROM python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build Compose's own file reader from `infra/check`."""
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
def test_compose_reads_the_file_as_these_tests_do(loader: Path) -> None:
    files = [ROOT / "docker-compose.yml"]
    for more, services in (((), SERVICES), ((ROOT / "docker-compose.cluster.yml",), {**SERVICES, **ON_CLUSTER})):
        result = subprocess.run([loader, *files, *more], capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stderr
        read = json.loads(result.stdout)["services"]
        assert set(read) == set(services)
        for name, service in services.items():
            added = DRIVERS[name]["environment"] if more and name in DRIVERS else {}
            assert read[name].get("environment", {}) == environment(service) | added, name
            assert read[name]["command"] == service.get("command"), name
            assert not added or {"home", "spark_key"} <= {
                one["source"] for kind in ("volumes", "secrets") for one in read[name][kind]
            }


@pytest.mark.extended
@pytest.mark.parametrize(
    ("text_before", "text_after"),
    [
        ("networks: [inside]", "networks: [outside]"),
        ("home:/var/lib/fleetpulse/home", "house:/var/lib/fleetpulse/home"),
        ("source: airflow_jwt", "source: airflow_token"),
        ("broker: { condition: service_healthy }", "brooker: { condition: service_healthy }"),
        ("1883:1883", "${PORT?}:1883"),
    ],
)
def test_compose_refuses_undefined_references(loader: Path, tmp_path: Path, text_before: str, text_after: str) -> None:
    shutil.copytree(INFRA, tmp_path / "infra")
    text = (ROOT / "docker-compose.yml").read_text()
    assert text_before in text
    (tmp_path / "docker-compose.yml").write_text(text.replace(text_before, text_after, 1))
    result = subprocess.run([loader, tmp_path / "docker-compose.yml"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1, text_after
