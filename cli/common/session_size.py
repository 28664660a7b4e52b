"""Cores and memory that a verb's Spark session may use, and the cluster that it runs on."""

from typing import TYPE_CHECKING

from fleetpulse.io.home.home import Home

if TYPE_CHECKING:
    from fleetpulse.io.spark.session import SparkResources


def session_resources_of(home: Home) -> "SparkResources":
    """Return the cores and memory of a session, and its cluster, from the settings of a home.

    Raises:
        FleetError: the settings name a cluster without its secret, or executors could not open the
            home by its path.
    """
    from fleetpulse.io.spark.session import SparkResources  # imports pyspark, which read-only verbs do not need
    from fleetpulse.settings import load_settings

    return SparkResources.of(home.path, load_settings(home.path))
