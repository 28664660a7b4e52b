"""Kubernetes manifests: schemas, privileges, and equality with the Compose files and the settings."""

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
import yaml
from jsonschema import Draft7Validator
from kubernetes_validate import ValidationError, utils, validate

from fleetpulse.io.spark.cluster import Cluster
from fleetpulse.paths import ROOT
from fleetpulse.settings import Settings, load_settings

MANIFESTS = ROOT / "infra" / "kubernetes"
KUSTOMIZATIONS = sorted(MANIFESTS.rglob("kustomization.yaml"))
OLDEST, NEWEST = "1.29", "1.37"  # init containers that keep running are on by default since the first
ALONE, CLUSTER = (yaml.safe_load((ROOT / f"docker-compose{kind}.yml").read_text())["services"] for kind in ("", ".cluster"))
COMPOSE: dict[str, Any] = CLUSTER | ALONE
SETTINGS_MAP, AIRFLOW_MAP, SECRET, CLAIM = "fleetpulse-settings", "fleetpulse-airflow", "fleetpulse", "home"
EXTRA = {"spark-worker": ["--port", "7078"]}  # arguments that only the pods have: a port for the network policies
_SCHEMA = functools.cache(utils.schema_contents)
PART_OF = {"app.kubernetes.io/part-of": "fleetpulse"}


def documents(*folders: str) -> list[dict[str, Any]]:
    """Return the resources that the kustomizations of folders name."""
    found: list[dict[str, Any]] = []
    for folder in folders:
        listed = yaml.safe_load((MANIFESTS / folder / "kustomization.yaml").read_text())["resources"]
        found += [one for name in listed for one in yaml.safe_load_all((MANIFESTS / folder / name).read_text())]
    return found


RESOURCES = documents("base", "airflow")
PODS: dict[str, dict[str, Any]] = {
    one["metadata"]["name"]: one["spec"]["template"] for one in RESOURCES if "template" in one["spec"]
}
CONTAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    container["name"]: (pod, container)
    for pod, template in PODS.items()
    for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"])
    if container["name"] != "kernels"
}
POLICIES = {one["metadata"]["name"]: one["spec"] for one in RESOURCES if one["kind"] == "NetworkPolicy"}
SERVICES = {one["metadata"]["name"]: one["spec"] for one in RESOURCES if one["kind"] == "Service"}


def literals(folder: str) -> dict[str, str]:
    """Return the settings that a kustomization generates."""
    generators = yaml.safe_load((MANIFESTS / folder / "kustomization.yaml").read_text())["configMapGenerator"]
    [generated] = [one for one in generators if one["name"] == SETTINGS_MAP]
    return dict(one.split("=", 1) for one in generated["literals"])


def files(kustomization: dict[str, Any]) -> Iterator[str]:
    """Yield the files and folders that a kustomization names."""
    yield from (*kustomization.get("resources", ()), *kustomization.get("components", ()))
    yield from (one["path"] for one in kustomization.get("patches", ()) if "path" in one)
    yield from (name for one in kustomization.get("configMapGenerator", ()) for name in one.get("files", ()))


@pytest.fixture(autouse=True)
def _read_schemas_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep parsed schemas: the definitions of a version have megabytes, and each validation reads them."""
    monkeypatch.setattr(utils, "schema_contents", _SCHEMA)


def faults_of(resources: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the faults of resources against the schemas of Kubernetes."""
    faults: list[tuple[str, str]] = []
    for one in resources:
        for version in (OLDEST, NEWEST):
            try:
                validate(one, version, strict=True)
            except ValidationError as error:
                faults.append((f"{one['kind']}/{one['metadata']['name']}", str(error).splitlines()[0]))
    return faults


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_a_kustomization_names_existing_files_and_leaves_out_none(path: Path) -> None:
    named = {*files(yaml.safe_load(path.read_text()))}
    assert {one for one in named if not (path.parent / one).exists()} == set()
    assert {one.name for one in path.parent.glob("*.yaml")} - {path.name} == {one for one in named if one.endswith(".yaml")}


def test_resources_and_their_references_to_each_other_are_valid() -> None:
    assert faults_of(RESOURCES) == []
    assert [fault for fault in faults_of([{**RESOURCES[0], "specs": {}}]) if "specs" in fault[1]], "a misspelt field is refused"
    [claim] = [one["spec"] for one in RESOURCES if one["kind"] == "PersistentVolumeClaim" and one["metadata"]["name"] == CLAIM]
    assert claim["accessModes"] == ["ReadWriteMany"], "executors on other nodes write into the home"
    names = [(one["kind"], one["metadata"]["name"]) for one in RESOURCES]
    assert len(names) == len(set(names))
    for name, service in SERVICES.items():
        [template] = [one for one in PODS.values() if service["selector"].items() <= one["metadata"]["labels"].items()]
        ports = [
            port for one in CONTAINERS.values() if one[0] in PODS and PODS[one[0]] is template for port in one[1].get("ports", ())
        ]
        for port in service["ports"]:
            target = port.get("targetPort", port["port"])
            assert [one for one in ports if target in (one["name"], one["containerPort"])], name
            assert port["port"] in [one["containerPort"] for one in ports if port["name"] == one["name"]], name


def test_patches_of_the_example_have_a_target() -> None:
    overlay = MANIFESTS / "overlays" / "example"
    known = {(one["kind"], one["metadata"]["name"]) for one in RESOURCES}
    targets = list[tuple[str, str]]()
    for patch in yaml.safe_load((overlay / "kustomization.yaml").read_text())["patches"]:
        parts = list(yaml.safe_load_all((overlay / patch["path"]).read_text()))
        named = [patch["target"]] if "target" in patch else [{"kind": one["kind"], **one["metadata"]} for one in parts]
        targets += [(one["kind"], one["name"]) for one in named]
    assert len(targets) > 4 and set(targets) <= known


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_kustomize_renders_an_example_whose_broker_is_reached_with_tls_alone() -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(MANIFESTS / "overlays" / "example")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    assert faults_of(rendered) == []
    found = {(one["kind"], one["metadata"]["name"]): one for one in rendered}
    pod = found["StatefulSet", "ingest"]["spec"]["template"]["spec"]
    kernels, broker, landing = pod["initContainers"]
    assert (kernels["name"], landing["name"]) == ("kernels", "landing"), "in the order of their start"
    assert "--plain" not in broker["args"] and broker["args"][-4:-2] == ["--port", "8883"]
    assert "1883" not in done.stdout
    [settings] = [one for (kind, _), one in found.items() if kind == "ConfigMap"]
    assert settings["data"] == literals("base") | literals("overlays/example")
    [volume] = [one for one in pod["volumes"] if one["name"] == "tls"]
    [mount] = [one for one in broker["volumeMounts"] if one["name"] == "tls"]
    named = {value for name, value in settings["data"].items() if name.startswith("FLEET_BROKER_")}
    assert named == {f"{mount['mountPath']}/{key}" for key in ("tls.crt", "tls.key", "ca.crt")} and volume["secret"]
    assert settings["metadata"]["name"] in str(pod), "a change of the settings restarts the pods"


PART_OF_PODS = documents("executors")
EXECUTOR: dict[str, Any] = yaml.safe_load((MANIFESTS / "executors/executor.yaml").read_text())
APPLICATION: dict[str, Any] = yaml.safe_load((MANIFESTS / "spark-application/snapshot.yaml").read_text())
TEMPLATE_MAP = "fleetpulse-executor"


def _strict(schema: Any) -> Any:
    """Return a schema of a custom resource that refuses unknown fields, as the API server does on demand."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema and "additionalProperties" not in schema else {}
    return {name: _strict(value) for name, value in schema.items()} | closed


def test_an_application_of_the_spark_operator_is_valid_and_runs_the_release() -> None:
    schema = json.loads((Path(__file__).parent / "sparkapplication.json").read_text())
    del schema["properties"]["metadata"]  # of all resources
    checked = Draft7Validator(_strict({**schema, "properties": {**schema["properties"], "metadata": {"properties": {}}}}))
    known = {**APPLICATION, "metadata": {}}
    assert [one.message for one in checked.iter_errors(known)] == []
    spec = APPLICATION["spec"]
    assert [*checked.iter_errors({**known, "spec": {**spec, "sparkversion": ""}})], "a misspelt field is refused"
    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "driver"}, "template": spec["driver"]["template"]}
    assert faults_of([template]) == []
    assert spec["sparkVersion"] == pyspark.__version__
    assert spec["image"] == literals("overlays/example-pods")["FLEET_EXECUTOR_IMAGE"]
    assert spec["driver"]["serviceAccount"] == "driver"
    root, _, main = spec["mainApplicationFile"].removeprefix("local://").partition("/cli/")
    assert (ROOT / "cli" / main).is_file()
    [container] = spec["driver"]["template"]["spec"]["containers"]
    assert (ROOT / container["command"][0].removeprefix(f"{root}/")).is_file()
    settings = {one["name"]: one["value"] for one in container["env"]}
    shared = literals("base") | literals("executors")
    assert settings == {name: shared[name] for name in ("FLEET_SPARK_KEY", "FLEET_SPARK_PORT", "FLEET_EXECUTOR_TEMPLATE")}
    lifecycle = PODS["lifecycle"]["spec"]["affinity"]["podAffinity"]
    assert spec["driver"]["template"]["spec"]["affinity"]["podAffinity"] == lifecycle, "locks are those of one node"


@pytest.mark.parametrize("pod", [EXECUTOR, APPLICATION["spec"]["driver"]["template"]], ids=["executor", "application"])
def test_a_pod_that_spark_creates_has_few_privileges_and_the_paths_of_the_drivers(pod: dict[str, Any]) -> None:
    spec, lifecycle = pod["spec"], PODS["lifecycle"]["spec"]
    assert PART_OF.items() <= pod["metadata"]["labels"].items(), "the policy that closes pods selects it"
    for name in ("automountServiceAccountToken", "enableServiceLinks", "securityContext"):
        assert spec[name] == lifecycle[name]
    [container], [driver] = spec["containers"], lifecycle["containers"]
    assert container["securityContext"] == driver["securityContext"]
    volumes = {one["name"]: one for one in spec["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == {*volumes}
    same = [one for one in lifecycle["volumes"] if one["name"] in ("volume", "secrets")]
    assert [volumes[one["name"]] for one in same] == same
    paths = {one["name"]: one for one in driver["volumeMounts"] if one["name"] in ("volume", "secrets")}
    assert {one["name"]: one for one in container["volumeMounts"] if one["name"] in paths} == paths
    assert "/var/tmp" in [one["mountPath"] for one in container["volumeMounts"] if one["name"].startswith("spark-local-dir-")]


def test_the_template_and_the_rights_of_executors_in_pods_are_valid() -> None:
    assert faults_of([*PART_OF_PODS, {**EXECUTOR, "metadata": {**EXECUTOR["metadata"], "name": "executor"}}]) == []
    [role] = [one for one in PART_OF_PODS if one["kind"] == "Role"]
    assert [rule["resources"] for rule in role["rules"]] == [["pods"]], "no secrets, and no rights outside of the namespace"
    assert (ROOT / EXECUTOR["spec"]["containers"][0]["command"][0].removeprefix("/opt/fleetpulse/")).is_file()
    assert "serviceAccountName" not in EXECUTOR["spec"]
    known = {"FLEET_" + field.upper() for field in Settings.model_fields}
    assert {*literals("executors"), *literals("overlays/example-pods")} <= known


def test_policies_of_executors_in_pods_open_only_ports_in_use(tmp_path: Path) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in PART_OF_PODS if one["kind"] == "NetworkPolicy"}
    ports = Cluster("k8s://https://kubernetes", tmp_path, first_port=int(literals("base")["FLEET_SPARK_PORT"])).ports()
    span = int(ports["spark.port.maxRetries"])
    first, blocks = int(ports["spark.driver.port"]), int(ports["spark.blockManager.port"])
    of_drivers = [{"protocol": "TCP", "port": first, "endPort": int(ports["spark.driver.blockManager.port"]) + span}]
    of_executors = [{"protocol": "TCP", "port": blocks, "endPort": blocks + span}]
    driver, executor = (
        {"podSelector": {"matchLabels": {"fleetpulse/spark": "driver"}}},
        {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "executor"}}},
    )
    assert policies["executor"]["ingress"] == [{"from": [driver, executor], "ports": of_executors}]
    assert policies["executor"]["egress"] == [
        {"to": [driver], "ports": of_drivers},
        {"to": [executor], "ports": of_executors},
    ]
    assert policies["driver"]["ingress"] == [{"from": [executor], "ports": of_drivers}]
    *inner, server = policies["driver"]["egress"]
    assert inner == [{"to": [executor], "ports": of_executors}] and "to" not in server
    for policy in policies.values():
        [selected] = policy["podSelector"]["matchLabels"].items()
        assert selected in [*EXECUTOR["metadata"]["labels"].items(), *PODS["lifecycle"]["metadata"]["labels"].items()]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_kustomize_renders_drivers_that_create_pods_in_place_of_workers() -> None:
    command = ["kubectl", "kustomize", str(MANIFESTS / "overlays" / "example-pods")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    assert faults_of(rendered) == []
    found = {(one["kind"], one["metadata"]["name"]): one for one in rendered}
    assert not [name for _, name in found if name.startswith(("spark-master", "spark-worker", "spark-driver"))]
    assert yaml.safe_load(found["ConfigMap", TEMPLATE_MAP]["data"]["executor.yaml"]) == EXECUTOR
    [settings] = [one["data"] for (_, name), one in found.items() if name.startswith(SETTINGS_MAP)]
    assert settings == literals("base") | literals("executors") | literals("overlays/example-pods")
    for name, container in (("lifecycle", "lifecycle"), ("airflow", "airflow-scheduler")):
        pod = found["Deployment", name]["spec"]["template"]["spec"]
        assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("driver", False)
        [one] = [one for one in pod["containers"] if one["name"] == container]
        assert one["image"] == settings["FLEET_EXECUTOR_IMAGE"]
        variables = {variable["name"]: variable for variable in one["env"]}
        fields = {"FLEET_DRIVER_POD": "metadata.name", "FLEET_EXECUTOR_NAMESPACE": "metadata.namespace"}
        assert {name: variables[name]["valueFrom"]["fieldRef"]["fieldPath"] for name in fields} == fields
        mounted = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
        assert settings["FLEET_EXECUTOR_TEMPLATE"] == f"{mounted['executor']}/executor.yaml"
        with_token = [part["name"] for part in pod["containers"] if "token" in {mount["name"] for mount in part["volumeMounts"]}]
        assert with_token == [container], "no other container can create pods"
    connection = json.loads(variables["AIRFLOW_CONN_SPARK_DEFAULT"]["value"])
    assert connection["host"].startswith("local["), "Airflow cannot submit to Kubernetes in client mode"


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_few_privileges_and_limits(name: str) -> None:
    pod = PODS[name]["spec"]
    assert PART_OF.items() <= PODS[name]["metadata"]["labels"].items(), "the policy that closes pods selects it"
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False, "SPARK_MASTER_PORT, made from a Service, would stop the master"
    user = pod["securityContext"]
    assert user["runAsNonRoot"] and user["runAsUser"] == user["fsGroup"] == (999 if name == "postgres" else 10001)
    assert user["fsGroupChangePolicy"] == "OnRootMismatch", "each start would open the home's files to the group"
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    volumes = {one["name"]: one for one in pod["volumes"]} | {"data": {}}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        rights = container["securityContext"]
        assert (rights["allowPrivilegeEscalation"], rights["readOnlyRootFilesystem"]) == (False, True)
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert {*container["resources"]["requests"]} == {*container["resources"]["limits"]} == {"cpu", "memory"}
        assert {one["name"] for one in container["volumeMounts"]} <= {*volumes}
    assert all("sizeLimit" in one["emptyDir"] for one in volumes.values() if "emptyDir" in one)


def test_each_container_of_compose_has_a_pod() -> None:
    assert {*CONTAINERS} == {*COMPOSE}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_equals_the_one_of_compose(name: str) -> None:
    _, container = CONTAINERS[name]
    service = COMPOSE[name]
    arguments, extra = list(container.get("args", [])), EXTRA.get(name, [])
    for word in extra:
        arguments.remove(word)
    assert arguments == (service.get("command") or [])
    assert container.get("command", []) == (service.get("entrypoint") or [])
    assert container["image"] == service["image"]
    limits = service["deploy"]["resources"]["limits"]
    assert container["resources"]["limits"]["memory"] == limits["memory"].upper() + "i"
    assert float(container["resources"]["limits"]["cpu"]) == float(limits["cpus"])
    if (probe := container.get("readinessProbe")) is None:
        assert "healthcheck" not in service
    elif "exec" in probe:
        check = service["healthcheck"]
        assert ["CMD", *probe["exec"]["command"]] == check["test"]
        assert [probe[one] for one in ("periodSeconds", "timeoutSeconds", "failureThreshold")] == [
            int(check["interval"].removesuffix("s")),
            int(check["timeout"].removesuffix("s")),
            check["retries"],
        ]
        assert "startupProbe" not in container or container["startupProbe"]["exec"] == probe["exec"]
    else:
        [port] = [one["containerPort"] for one in container["ports"] if one["name"] == probe["httpGet"]["port"]]
        assert re.search(rf":{port}{probe['httpGet']['path']}", service["healthcheck"]["test"][-1])


def test_pods_start_and_stop_in_the_order_of_compose() -> None:
    ingest = PODS["ingest"]["spec"]
    order = [one["name"] for one in (*ingest["initContainers"], *ingest["containers"])]
    assert order == ["kernels", "broker", "landing", "bridge"]
    assert [one.get("restartPolicy") for one in ingest["initContainers"]] == [None, "Always", "Always"]
    assert all("startupProbe" in one for one in ingest["initContainers"][1:]), "the next one waits for it"
    airflow = PODS["airflow"]["spec"]
    assert [one["name"] for one in airflow["initContainers"]] == ["kernels", "airflow-init", "airflow-api-server"]
    once = {one["metadata"]["name"]: one for one in RESOURCES if "template" in one["spec"]}
    assert all(one["spec"]["replicas"] == 1 for name, one in once.items() if name != "spark-worker")
    deployed = [one["spec"] for name, one in once.items() if one["kind"] == "Deployment" and name != "spark-worker"]
    assert [one["strategy"] for one in deployed] == [{"type": "Recreate"}] * 4
    for name in ("lifecycle", "airflow", "page"):
        [rule] = PODS[name]["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule["labelSelector"]["matchLabels"].items() <= PODS["ingest"]["metadata"]["labels"].items()
        if name == "page":
            continue  # it has no node to return to: it keeps nothing
        [back] = ingest["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert back["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= PODS[name]["metadata"]["labels"].items()


def test_a_pod_gets_the_secrets_of_the_containers_of_compose(tmp_path: Path) -> None:
    subprocess.run([str(ROOT / "infra/secrets/make"), str(tmp_path / "secrets")], check=True, capture_output=True)
    made = {path.name for path in (tmp_path / "secrets").iterdir()}
    for name, (pod, container) in CONTAINERS.items():
        volumes = {one["name"]: one for one in PODS[pod]["spec"]["volumes"]}
        got: dict[str, str] = {}
        for mount in container["volumeMounts"]:
            volume = volumes.get(mount["name"], {})
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] == CLAIM
            if secret := volume.get("secret"):
                assert secret["secretName"] == SECRET and secret["defaultMode"] == 0o440 and mount["readOnly"]
                got |= {f"{mount['mountPath']}/{one['path']}": one["key"] for one in secret["items"]}
        assert set(got.values()) <= made
        expected: dict[str, str] = {}
        for one in (*ALONE.get(name, {}).get("secrets", ()), *CLUSTER.get(name, {}).get("secrets", ())):
            expected |= {one["target"]: one["source"]} if isinstance(one, dict) else {f"/run/secrets/{one}": one}
        assert expected.items() <= got.items(), name
        if pod != "airflow":  # its containers run as one user, and share their processes
            assert got == expected, name


def test_variables_are_those_of_compose_and_each_setting_exists() -> None:
    fields = {"FLEET_" + field.upper() for field in Settings.model_fields}
    base = literals("base")
    assert {*base, *literals("overlays/example")} <= fields
    assert CLUSTER["lifecycle"]["environment"].items() <= base.items()
    for name, (_, container) in CONTAINERS.items():
        own = {one["name"]: one["value"] for one in container.get("env", ())}
        assert {one for one in own if one.startswith("FLEET_")} <= fields
        maps = [one["configMapRef"]["name"] for one in container.get("envFrom", ())]
        ours = name.partition("-")[0] not in ("spark", "postgres")
        assert maps == ([SETTINGS_MAP, AIRFLOW_MAP] if name.startswith("airflow") else [SETTINGS_MAP] if ours else [])
        local = {  # one pod instead of several containers; a folder that outlives the pod
            "AIRFLOW__API__HOST",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL",
            "SPARK_MASTER_OPTS",
        }
        added = {"FLEET_DRIVER_HOST", "AIRFLOW_CONN_SPARK_DEFAULT", "PGDATA"}
        expected = {one: value for one, value in COMPOSE[name].get("environment", {}).items() if one not in base}
        assert {one: value for one, value in own.items() if one not in local | added} == {
            one: value for one, value in expected.items() if one not in local
        }
        assert local & set(own) == local & set(expected)


def test_sessions_of_two_drivers_fit_into_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = {one["metadata"]["name"]: one for one in RESOURCES if one["kind"] == "Deployment"}["spark-worker"]["spec"]
    arguments = CONTAINERS["spark-worker"][1]["args"]
    example = yaml.safe_load((MANIFESTS / "overlays/example/kustomization.yaml").read_text())
    [more] = [one["count"] for one in example["replicas"] if one["name"] == "spark-worker"]
    for replicas, chosen in ((workers["replicas"], literals("base")), (more, literals("base") | literals("overlays/example"))):
        for name, value in chosen.items():
            monkeypatch.setenv(name, value)
        settings = load_settings(tmp_path)
        assert 2 * settings.task_cores <= replicas * int(arguments[arguments.index("--cores") + 1])
        memory_gb = int(arguments[arguments.index("--memory") + 1].removesuffix("g"))
        assert 2 * settings.executors * int(settings.executor_memory.removesuffix("g")) <= replicas * memory_gb
        assert settings.spark_master == f"spark://spark-master:{SERVICES['spark-master']['ports'][0]['port']}" == arguments[-1]


@pytest.mark.parametrize("name", ["lifecycle", "airflow"])
def test_executors_reach_a_driver_at_a_name_of_its_own(name: str) -> None:
    container = CONTAINERS["airflow-scheduler" if name == "airflow" else name][1]
    [host] = [one["value"] for one in container["env"] if one["name"] == "FLEET_DRIVER_HOST"]
    assert host == name == PODS[name]["spec"]["hostname"], "the driver binds to the address of its name"
    service = SERVICES[host]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    assert PODS[name]["metadata"]["labels"]["fleetpulse/spark"] == "driver"
    first = int(literals("base")["FLEET_SPARK_PORT"])
    assert [one["port"] for one in service["ports"]] == [first, first + 16]
    connection = [one["value"] for one in container["env"] if one["name"] == "AIRFLOW_CONN_SPARK_DEFAULT"]
    assert all("{host}:{port}".format(**json.loads(one)) == literals("base")["FLEET_SPARK_MASTER"] for one in connection)


def _opened(direction: str) -> set[tuple[str, str, int, int]]:
    """Return the allowed connections: names of the connecting and the other pod, first and last port."""
    peer = {"ingress": "from", "egress": "to"}[direction]
    found: set[tuple[str, str, int, int]] = set()
    for policy in POLICIES.values():
        own = [
            name
            for name, pod in PODS.items()
            if policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        ]
        assert own, "a policy selects a pod"
        for rule in policy.get(direction, ()):
            peers = {
                name if one["podSelector"] else "*"
                for one in rule.get(peer, ())
                for name, pod in PODS.items()
                if one["podSelector"].get("matchLabels", {}).items() <= pod["metadata"]["labels"].items()
            } or {"anywhere"}
            for port in rule["ports"]:
                last = port.get("endPort", port["port"])
                ways = {(other, one) if direction == "ingress" else (one, other) for one in own for other in peers}
                found |= {(*way, port["port"], last) for way in ways}
    return found


def test_network_policies_close_all_pods_and_open_only_ports_in_use(tmp_path: Path) -> None:
    assert POLICIES["closed"]["policyTypes"] == ["Ingress", "Egress"] and "ingress" not in POLICIES["closed"]
    assert POLICIES["closed"]["podSelector"]["matchLabels"] == PART_OF
    ports = Cluster("spark://spark-master:7077", tmp_path, first_port=int(literals("base")["FLEET_SPARK_PORT"])).ports()
    span = int(ports["spark.port.maxRetries"])
    driver, taken, executor = (int(ports[f"spark.{kind}.port"]) for kind in ("driver", "driver.blockManager", "blockManager"))
    inner = {("spark-worker", "spark-master", 7077, 7077), ("spark-master", "spark-worker", 7078, 7078)}
    inner |= {("spark-worker", "spark-worker", executor, executor + span)}
    assert taken == driver + span + 1
    for one in ("lifecycle", "airflow"):
        inner |= {(one, "spark-master", 7077, 7077), ("spark-master", one, driver, driver + span)}
        inner |= {("spark-worker", one, driver, taken + span), (one, "spark-worker", executor, executor + span)}
    inner |= {("airflow", "postgres", 5432, 5432)}
    assert _opened("ingress") == inner | {("*", "ingest", 1883, 1883), ("*", "page", 8090, 8090)}
    outside = {(name, "anywhere", 53, 53) for name in PODS} | {("airflow", "anywhere", 443, 443)}
    assert _opened("egress") == inner | outside | {("airflow", "ingest", 1883, 1883)}
