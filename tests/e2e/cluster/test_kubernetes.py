"""Executors in pods: Spark's own scheduler creates them at a fake API server, and a fake kubelet runs them.

The template is that of the manifests, and so is the program that each pod runs. As root on Linux, driver
and pods run as another user who sees the installation and the shared folder only.
"""

import json
import re
import signal
from collections.abc import Iterator

import psutil
import pytest
import yaml

from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.paths import ROOT
from fleetpulse.reports.agreement import defined, emitted
from tests.support.fleet_command import await_none_left, fleet_command
from tests.support.histories.streams import DEPLOYMENT, history, land
from tests.support.spark_cluster import DRIVER_POD, IMAGE, NAMESPACE, PodCluster, pod_cluster
from tests.support.wait import await_that

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(2400)]  # each step has its own, shorter limit


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodCluster]:
    with pod_cluster(tmp_path_factory.mktemp("pods")) as running:
        yield running


def running_executors(cluster: PodCluster) -> dict[str, psutil.Process]:
    """Return the executors that run, by pod."""
    return {name: one for name, one in cluster.kubernetes.pods(NAMESPACE).items() if one.name() == "java"}


def test_job_on_pods_equals_the_definition_and_a_killed_pod_is_replaced_and_costs_nothing(cluster: PodCluster) -> None:
    home, rows = Home(cluster.shared / "home"), history(7)
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    cut = len(rows) // 2
    land(home, rows[:cut], 1)
    cluster.share(home.path)
    job = cluster.start_driver(fleet_command("job", "lifecycle", "--home", str(home.path)), cluster.settings())
    await_that(lambda: _reached(home, rows[cut - 1].received_at_ms), what="the first batch", by=job)
    executors = running_executors(cluster)
    assert len(executors) == 2
    assert all(cluster.ports(2, one) for one in executors.values()), "a policy of the network knows the ports"
    land(home, rows[cut:], 2)
    cluster.share(home.table(MESSAGES.name))
    await_that((home.checkpoint / "offsets" / "1").exists, what="the second batch", by=job, pause_s=0.02)
    killed = min(executors)
    executors[killed].kill()
    await_that(lambda: _reached(home, rows[-1].received_at_ms), what="the end of the rows", by=job)
    replaced = await_that(lambda: {*running_executors(cluster)} - {*executors}, what="another pod", by=job)
    assert len(replaced) == 1 and killed not in running_executors(cluster)
    job.send_signal(signal.SIGTERM)
    assert job.wait(120) == 0, job.communicate()[0]
    assert emitted(home) == defined(rows, DEPLOYMENT)
    left = [one["metadata"]["name"] for one in cluster.kubernetes.objects.chosen("pods", NAMESPACE, {})]
    assert left == [DRIVER_POD], "the driver deletes the pods of its executors"
    await_none_left(home.path)


def test_definitions_of_pods_have_no_secret_and_the_driver_as_owner(cluster: PodCluster) -> None:
    assert len(cluster.kubernetes.created) >= 3
    secret = cluster.secret.read_text().strip()
    for text in cluster.kubernetes.created:
        assert secret not in text and "_SPARK_AUTH_SECRET" not in text
        assert f"-Dspark.authenticate.secret.file={cluster.secret}" in text
        pod = json.loads(text)
        [owner] = pod["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("Pod", DRIVER_POD)
        assert pod["spec"]["automountServiceAccountToken"] is False
        [container] = pod["spec"]["containers"]
        assert container["image"] == IMAGE
        assert container["resources"]["limits"]["memory"] == "1024Mi", "the heap, and the memory beside it"


def test_the_driver_asks_for_no_more_than_its_role_allows(cluster: PodCluster) -> None:
    documents = yaml.safe_load_all((ROOT / "infra/kubernetes/executors/driver.yaml").read_text())
    [role] = [one for one in documents if one["kind"] == "Role"]
    allowed = {(verb, resource) for rule in role["rules"] for verb in rule["verbs"] for resource in rule["resources"]}
    asked = {_right(request) for request in cluster.kubernetes.requests}
    assert ("create", "pods") in asked and asked <= allowed


def _right(request: str) -> tuple[str, str]:
    """Return the verb and the resource of the rights that a request needs."""
    found = re.match(r'"(?P<method>[A-Z]+) /api/v1/namespaces/fleetpulse/(?P<kind>\w+)(?P<name>/[\w-]+)?(?P<query>\?\S*)?', request)
    assert found is not None, request
    many = "collection" if not found["name"] else ""
    if found["method"] == "GET":
        verb = "watch" if "watch=true" in (found["query"] or "") else "list" if many else "get"
    else:
        verb = {"POST": "create", "PATCH": "patch", "DELETE": f"delete{many}"}[found["method"]]
    return verb, found["kind"]


def _reached(home: Home, received_at_ms: int) -> bool:
    reached = judged_up_to(home.checkpoint)
    return reached is not None and reached[1] >= received_at_ms
