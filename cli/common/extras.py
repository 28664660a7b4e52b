"""Check for optional dependencies, which ``./fleet`` installs at their first use."""

from fleetpulse.core.errors import FleetError


def require_installed() -> None:
    """Check that Great Expectations is installed.

    Raises:
        FleetError: Great Expectations is not installed.
    """
    from importlib.util import find_spec

    if find_spec("great_expectations") is None:
        raise FleetError(
            "Great Expectations is not installed yet; run ./fleet quality suites, which installs it, and try again",
            code="dependency-missing",
        )
