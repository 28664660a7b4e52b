"""The policy and the deployment that the options of a command choose, and the mappings of a home."""

import tomllib
from pathlib import Path

from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.messages.mapping import TopicMapping, parse_mappings
from fleetpulse.core.policy import Policy, parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.times import parse_duration_ms
from fleetpulse.io.home.home import Home


def deployment_of(home: Path, lateness: str | None) -> Deployment | None:
    """Return the deployment that was asked for, by option or settings; None where none was.

    Raises:
        FleetError: the settings have faults.
        Misuse: the lateness is below a second.
    """
    from fleetpulse.settings import load_settings  # it costs a tenth of a second, and the verbs that look need none

    lateness_ms = None if lateness is None else parse_duration_ms(lateness)
    if lateness_ms is not None and lateness_ms < 1_000:
        raise Misuse(f'--lateness must be at least 1s; got "{lateness}"', code="lateness-too-short")
    return load_settings(home).deployment(lateness_ms)


def policy_of(path: Path | None, timeout: str | None, otherwise: dict[str, object] | None = None) -> Policy:
    """Return the policy of a file, with the timeout that was asked for.

    Raises:
        FleetError: the file or the policy has faults.
    """
    content: dict[str, object] = dict(otherwise or {})
    if path is not None:
        content = read_toml(path)
    if timeout is not None:
        rules = content.get("rules")
        content["rules"] = {**(rules if isinstance(rules, dict) else {}), "timeout": timeout}
    return parse_policy(content)


def read_toml(path: Path) -> dict[str, object]:
    """Read a TOML file.

    Raises:
        FleetError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise FleetError(
            f'"{path}" cannot be read ({error.strerror}); name a TOML file that is there', code="file-unreadable"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FleetError(f'"{path}" is not TOML ({error})', code="toml-invalid") from None


def load_mappings(home: Home) -> tuple[TopicMapping, ...]:
    """Return the mappings of a home; none without a mapping file.

    Raises:
        FleetError: the file has faults.
    """
    if not home.mapping.exists():
        return ()
    try:
        return parse_mappings(tomllib.loads(home.mapping.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise FleetError(f'"{home.mapping}" is not TOML ({error})', code="toml-invalid") from None
