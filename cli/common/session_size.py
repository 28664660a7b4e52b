"""How much of the machine a verb's session may take."""

from typing import TYPE_CHECKING

from fleetpulse.io.home.home import Home

if TYPE_CHECKING:
    from fleetpulse.io.spark.session import SparkResources


def size_of(home: Home) -> "SparkResources":
    """Return what the settings of a home give to each session."""
    from fleetpulse.io.spark.session import SparkResources  # and with it pyspark, which who only looks does without
    from fleetpulse.settings import load_settings

    settings = load_settings(home.path)
    return SparkResources(settings.cores, settings.heap)
