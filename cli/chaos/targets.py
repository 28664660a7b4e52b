"""Kinds of kill that ``fleet chaos`` performs."""

from enum import StrEnum
from typing import Final


class KillKind(StrEnum):
    """Kinds of kill."""

    BRIDGE = "bridge"
    BROKER = "broker"  # restarted at once
    LANDING = "landing"
    LIFECYCLE = "lifecycle"  # the job itself, or its JVM
    OUTAGE = "outage"  # the broker, down for longer than the timeout
    EXECUTOR = "executor"  # the JVM of an executor; this kind and the next one need a cluster
    WORKER = "worker"  # a worker with its executors, which restarts at once


OF_CLUSTER: Final = (KillKind.EXECUTOR, KillKind.WORKER)
OF_JOBS: Final = (KillKind.BRIDGE, KillKind.LANDING, KillKind.LIFECYCLE)
