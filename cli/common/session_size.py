"""Cores and memory that a verb's Spark session may use."""

from typing import TYPE_CHECKING

from fleetpulse.io.home.home import Home

if TYPE_CHECKING:
    from fleetpulse.io.spark.session import SparkResources


def session_resources_of(home: Home) -> "SparkResources":
    """Return the cores and memory of a session, from the settings of a home."""
    from fleetpulse.io.spark.session import SparkResources  # imports pyspark, which read-only verbs do not need
    from fleetpulse.settings import load_settings

    settings = load_settings(home.path)
    return SparkResources(settings.cores, settings.heap)
