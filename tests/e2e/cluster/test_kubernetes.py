"""Executors in pods: Spark's own scheduler creates them at a fake API server, and a fake kubelet runs them.

The template is that of the manifests, and so is the program that each pod runs. As root on Linux, driver
and pods run as another user who sees the installation and the shared folder only.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.spark.jars import spark_home
from fleetpulse.io.spark.java import find_java
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import snapshots
from fleetpulse.paths import ROOT
from fleetpulse.reports.operations.agreement import defined, emitted
from tests.support.fleet_command import await_none_left, fleet_command
from tests.support.histories.streams import DEPLOYMENT, land
from tests.support.spark_cluster import DRIVER_POD, IMAGE, NAMESPACE, PodCluster, has_judged, localized, pod_cluster, start_job
from tests.support.wait import PATIENCE_S, await_that

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(2400)]  # each step has its own, shorter limit

_REQUEST = re.compile(r'"(?P<method>[A-Z]+) /api/v1/namespaces/[a-z]+/(?P<kind>\w+)(?P<name>/[\w-]+)?(?P<query>\?\S*)?')


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodCluster]:
    with pod_cluster(tmp_path_factory.mktemp("pods")) as running:
        yield running


def running_executors(cluster: PodCluster) -> dict[str, psutil.Process]:
    """Return the executors that run, by pod."""
    return {name: one for name, one in cluster.kubernetes.pods(NAMESPACE).items() if one.name() == "java"}


def require_no_secret(cluster: PodCluster) -> None:
    """Check the definitions of all pods of executors."""
    secret = cluster.secret.read_text().strip()
    for text in cluster.kubernetes.created_in(NAMESPACE):
        assert secret not in text and "_SPARK_AUTH_SECRET" not in text
        assert f"-Dspark.authenticate.secret.file={cluster.secret}" in text
        pod = json.loads(text)
        [owner] = pod["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("Pod", DRIVER_POD)
        assert pod["spec"]["automountServiceAccountToken"] is False
        [container] = pod["spec"]["containers"]
        assert container["image"] == IMAGE
        assert container["resources"]["limits"]["memory"] == "1024Mi", "the heap, and the memory beside it"


def require_rights_of_the_role(requests: list[str]) -> None:
    """Check that the role of drivers allows what a driver requested."""
    documents = yaml.safe_load_all((ROOT / "infra/kubernetes/executors/driver.yaml").read_text())
    [role] = [one for one in documents if one["kind"] == "Role"]
    allowed = {(verb, resource) for rule in role["rules"] for verb in rule["verbs"] for resource in rule["resources"]}
    asked = {_right(request) for request in requests}
    assert ("create", "pods") in asked and asked <= allowed


def _right(request: str) -> tuple[str, str]:
    """Return the verb and the resource of the rights that a request needs."""
    found = _REQUEST.match(request)
    assert found is not None, request
    many = "collection" if not found["name"] else ""
    if found["method"] == "GET":
        verb = "watch" if "watch=true" in (found["query"] or "") else "list" if many else "get"
    else:
        verb = {"POST": "create", "PATCH": "patch", "DELETE": f"delete{many}"}[found["method"]]
    return verb, found["kind"]


def submission(application: dict[str, Any], master: str, template: Path) -> list[str]:
    """Return the command line with which the Spark operator submits an application."""
    spec = application["spec"]
    driver, executor = spec["driver"], spec["executor"]
    template.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", **driver["template"]}))
    conf = {
        "spark.kubernetes.namespace": application["metadata"]["namespace"],
        "spark.kubernetes.container.image": spec["image"],
        "spark.kubernetes.submission.waitAppCompletion": "false",
        "spark.kubernetes.driver.pod.name": f"{application['metadata']['name']}-driver",
        "spark.kubernetes.driver.podTemplateFile": str(template),
        "spark.kubernetes.driver.podTemplateContainerName": "spark-kubernetes-driver",
        "spark.kubernetes.authenticate.driver.serviceAccountName": driver["serviceAccount"],
        "spark.driver.cores": driver["cores"],
        "spark.driver.memory": driver["memory"],
        "spark.driver.memoryOverhead": driver["memoryOverhead"],
        "spark.executor.instances": executor["instances"],
        "spark.executor.cores": executor["cores"],
        "spark.executor.memory": executor["memory"],
        "spark.executor.memoryOverhead": executor["memoryOverhead"],
    }
    given = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    program = str(spark_home() / "bin" / "spark-submit")
    options = ("--master", master, "--deploy-mode", spec["mode"], "--name", application["metadata"]["name"])
    return [program, *options, *given, spec["mainApplicationFile"], *spec["arguments"]]


def take_snapshot_by_an_application(cluster: PodCluster, home: Home) -> None:
    """Submit the example of an application as the Spark operator does, and wait for the end of its driver."""
    text = localized((ROOT / "infra/kubernetes/spark-application/snapshot.yaml").read_text(), cluster.shared)
    application = yaml.safe_load(text)
    application["spec"]["executor"] |= {"instances": 1, "cores": 1, "memory": "512m", "memoryOverhead": "512m"}
    assert application["spec"]["arguments"][-1] == str(home.path)
    before = len(cluster.kubernetes.created_in(NAMESPACE))
    command = submission(application, f"k8s://{cluster.kubernetes.address}", cluster.driver / "driver.yaml")
    environment = {**os.environ, "JAVA_HOME": str(find_java()), "SPARK_HOME": str(spark_home())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    def ended() -> str:
        phase = cluster.kubernetes.objects.get("pods", NAMESPACE, "snapshot-driver")["status"]["phase"]
        return phase if phase in ("Succeeded", "Failed") else ""

    assert await_that(ended, what="the end of the driver") == "Succeeded", cluster.kubernetes.log("snapshot-driver")
    driver, *executors = [json.loads(one) for one in cluster.kubernetes.created_in(NAMESPACE)[before:]]
    assert driver["metadata"]["labels"]["fleetpulse/spark"] == "driver", "the policies of the network select it"
    assert driver["spec"]["serviceAccountName"] == "driver"
    assert [one["metadata"]["ownerReferences"][0]["name"] for one in executors] == ["snapshot-driver"]
    assert [one["spec"]["containers"][0]["image"] for one in executors] == [application["spec"]["image"]]
    [snapshot] = snapshots(home)
    query = "SELECT count(*) AS found FROM device_snapshots WHERE part = 'device'"
    assert tables.query(home, query, tables=["device_snapshots"])[0]["found"] == snapshot.devices > 0


def test_executors_run_as_another_user_who_sees_none_of_the_drivers_folders(cluster: PodCluster) -> None:
    if cluster.host is None:
        pytest.skip(cluster.unavailable)
    found = _probed(cluster)
    uid, seen, hidden = found.split()
    assert (int(uid) != os.geteuid(), seen, hidden) == (True, "True", "False")


def _probed(cluster: PodCluster) -> str:
    """Run a pod that prints its user, and whether it sees the shared folder and that of the driver."""
    code = "import os, sys; print(os.geteuid(), *map(os.path.isdir, sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(cluster.shared), str(cluster.driver)]
    container = {"name": "probe", "image": IMAGE, "command": command, "volumeMounts": []}
    pod = {"metadata": {"name": "probe"}, "spec": {"containers": [container], "volumes": []}}
    cluster.kubernetes.create("pods", "probes", pod)
    await_that(
        lambda: cluster.kubernetes.objects.get("pods", "probes", "probe")["status"]["phase"] == "Succeeded", what="the pod"
    )
    return cluster.kubernetes.log("probe")


def test_pods_that_fail_at_once_are_an_error_of_the_command(cluster: PodCluster) -> None:
    home = Home(cluster.shared / "failing")
    home.prepare(DEPLOYMENT)
    template = cluster.shared / "failing.yaml"
    template.write_text(cluster.template.read_text().replace(f"{ROOT}/infra/spark/executor", "/bin/false"))
    cluster.share(cluster.shared)
    settings = {**cluster.settings(), "FLEET_EXECUTOR_TEMPLATE": str(template), "FLEET_EXECUTOR_NAMESPACE": "failing"}
    done = cluster.run_driver(fleet_command("doctor", "--home", str(home.path)), {**settings, "FLEET_DRIVER_POD": ""})
    printed = done.stdout + done.stderr
    assert (done.returncode, "Traceback" in printed) == (1, False), printed
    assert "see kubectl get pods, describe and logs in the namespace failing" in printed


def test_job_and_snapshot_on_pods_equal_the_definition_and_a_killed_pod_costs_nothing(cluster: PodCluster) -> None:
    home, rows, cut, job = start_job(cluster)
    executors = running_executors(cluster)
    assert len(executors) == 2
    assert all(cluster.ports(2, one) for one in executors.values()), "a policy of the network knows the ports"
    land(home, rows[cut:], 2)
    cluster.share(home.table(MESSAGES.name))
    await_that((home.checkpoint / "offsets" / "1").exists, what="the second batch", by=job, pause_s=0.02)
    killed = min(executors)
    executors[killed].kill()
    await_that(lambda: has_judged(home, rows[-1].received_at_ms), what="the end of the rows", by=job)
    replaced = await_that(lambda: {*running_executors(cluster)} - {*executors}, what="another pod", by=job)
    assert len(replaced) == 1 and killed not in running_executors(cluster)
    job.send_signal(signal.SIGTERM)
    assert job.wait(120) == 0, job.communicate()[0]
    assert emitted(home) == defined(rows, DEPLOYMENT)
    left = [one["metadata"]["name"] for one in cluster.kubernetes.objects.chosen("pods", NAMESPACE, {})]
    assert left == [DRIVER_POD], "the driver deletes the pods of its executors"
    require_no_secret(cluster)
    require_rights_of_the_role(cluster.kubernetes.requests)
    take_snapshot_by_an_application(cluster, home)
    await_none_left(home.path)
