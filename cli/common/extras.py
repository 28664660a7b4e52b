"""Optional dependencies: packages that the environment installs at their first use."""

from fleetpulse.core.errors import FleetError


def require_installed() -> None:
    """Check that Great Expectations is installed.

    Raises:
        FleetError: it is not.
    """
    from importlib.util import find_spec

    if find_spec("great_expectations") is None:
        raise FleetError(
            "Great Expectations is not installed yet; the first ./fleet quality suites installs it: try again then",
            code="dependency-missing",
        )
