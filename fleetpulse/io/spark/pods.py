"""Executors in pods, which Spark's own scheduler creates on Kubernetes from a template.

Rule 1: a pod's definition has the path of the secret, not the secret: all who may read pods could read it.
Rule 2: the driver needs rights on pods alone. It creates no ConfigMaps, Services or volumes.

Source: docs/adr/0043-executors-as-pods.md
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

KUBERNETES: Final = "k8s://"  # prefix of a master's address
_FAILURES_COUNT_FOR: Final = "1h"


@dataclass(frozen=True, slots=True)
class Pods:
    """Pods of executors.

    Attributes:
        image: image of the executors, which has the same installation as the driver.
        template: file with the template of a pod.
        namespace: namespace of the pods.
        overhead: memory of a pod beside the heap of its executor, in Java's notation.
        driver: name of the driver's pod in this namespace, which owns the pods; empty outside of a pod.
    """

    image: str
    template: Path
    namespace: str = "default"
    overhead: str = "2g"
    driver: str = ""

    def hint(self) -> str:
        """Return advice for an error: where to look if pods are missing or fail."""
        return (
            f"see kubectl get pods, describe and logs in the namespace {self.namespace}: if there is no pod, the service account "
            f"of the driver may not create pods; a pending pod lacks a node or an image; the log of a failed pod has the reason; "
            "check driver_host, driver_pod, and the settings of executors"
        )

    def settings(self, executors: int, secret: Path) -> dict[str, str]:
        """Return Spark's settings of the pods.

        Args:
            executors: number of pods.
            secret: file of the secret, at the same path in all pods.
        """
        kubernetes = "spark.kubernetes"
        return {
            "spark.executor.instances": str(executors),
            "spark.executor.memoryOverhead": self.overhead,
            # Spark ends a session after twice as many failures as executors, even if they are months apart.
            "spark.executor.failuresValidityInterval": _FAILURES_COUNT_FOR,
            "spark.authenticate.secret.file": str(secret),
            f"{kubernetes}.namespace": self.namespace,
            f"{kubernetes}.container.image": self.image,
            f"{kubernetes}.executor.podTemplateFile": str(self.template),
            f"{kubernetes}.executor.disableConfigMap": "true",  # of a folder that has no files
            f"{kubernetes}.driver.service.deleteOnTermination": "false",  # that Service is a manifest
            f"{kubernetes}.driver.ownPersistentVolumeClaim": "false",
            **({f"{kubernetes}.driver.pod.name": self.driver} if self.driver else {}),
        }
