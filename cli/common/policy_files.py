"""Policy and deployment from the options of a command, and mappings of a home."""

import tomllib
from pathlib import Path

from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.messages.mapping import Mappings
from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.core.policy import Policy, parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.times import parse_duration_ms
from fleetpulse.io.home.home import Home


def deployment_of(home: Path, lateness: str | None) -> Deployment | None:
    """Return the deployment that an option or the settings request, or None.

    Raises:
        FleetError: the settings have faults.
        Misuse: the lateness is below a second.
    """
    from fleetpulse.settings import load_settings  # takes 0.1 s, and read-only verbs do not need it

    lateness_ms = None if lateness is None else parse_duration_ms(lateness)
    if lateness_ms is not None and lateness_ms < 1_000:
        raise Misuse(f'--lateness must be at least 1s; got "{lateness}"', code="lateness-too-short")
    return load_settings(home).deployment(lateness_ms)


def policy_of(path: Path | None, timeout: str | None, otherwise: dict[str, object] | None = None) -> Policy:
    """Return the policy of a file, with a requested timeout.

    Args:
        path: policy file; None for ``otherwise``.
        timeout: timeout that replaces that of the policy; None keeps it.
        otherwise: content without a file; None for the built-in policy.

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
        FleetError: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise FleetError(
            f'"{path}" cannot be read ({error.strerror}); name an existing TOML file', code="file-unreadable"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FleetError(f'"{path}" is not TOML ({error})', code="toml-invalid") from None


def load_mappings(home: Home) -> Mappings:
    """Return the mappings of a home; without a mapping file, they have no rules.

    Raises:
        FleetError: the file has faults.
    """
    if not home.mapping.exists():
        return Mappings()
    return read_mappings(home.mapping)


def spaces_note(what: str) -> str:
    """Return a sentence about a topic with a space: its effect, and what to do.

    Args:
        what: the topic, or the rule that has it.
    """
    return (
        f"{what} has a space, and the embedded broker refuses subscriptions and messages with such topics; rename the topic at "
        f"the device, or use another broker (--broker)"
    )


def require_no_spaces(path: Path, mappings: Mappings) -> None:
    """Refuse a mapping file with rules that the embedded broker refuses.

    Raises:
        FleetError: the topic of a rule has a space.
    """
    if patterns := mappings.patterns_with_spaces():
        rule = f'the topic "{patterns[0]}" in "{path}"'
        raise FleetError(f"{spaces_note(rule)}, or remove the rule", code="mapping-space")


def read_mappings(path: Path) -> Mappings:
    """Read a mapping file.

    Raises:
        FleetError: the file cannot be read, is not TOML, or has faults.
    """
    from fleetpulse.io.ingest.payload_paths import compile_path  # imports JMESPath, which few verbs need

    return parse_mappings(read_toml(path), compile_path)
