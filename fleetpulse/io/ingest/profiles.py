"""Profiles: ready-made mappings for products and platforms, in the folder ``mapping_profiles``.

A profile is a mapping file. Its first line is a comment with its purpose, and ``SITE`` is a placeholder
for the site of the devices. ``fleet map add`` copies a profile into the mapping file of a home.

Sparkplug has no file: the bridge decodes it without rules if the setting ``sparkplug_host`` is set.
``fleet map add`` sets it.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.decode import site_fault
from fleetpulse.core.messages.mapping import Mappings
from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.io.ingest.payload_paths import compile_path

FOLDER: Final = Path(__file__).with_name("mapping_profiles")
SPARKPLUG: Final = "sparkplug"
_ABOUT_SPARKPLUG: Final = "Sparkplug B: edge nodes and their devices (spBv1.0/...); sets sparkplug_host, adds no rules"
_SITE: Final = '"SITE"'


@cache
def names() -> tuple[str, ...]:
    """Return the names of all profiles with rules, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def about(name: str) -> str:
    """Return the purpose of a profile, in one line."""
    return _ABOUT_SPARKPLUG if name == SPARKPLUG else _text(name).partition("\n")[0].removeprefix("# ")


def heading(name: str) -> str:
    """Return the line that begins a profile in a mapping file."""
    return f"# Profile {name}"


def read_profile(name: str, site: str) -> str:
    """Return a profile as text for a mapping file.

    Args:
        name: name of the profile.
        site: site of the devices.

    Raises:
        FleetError: there is no such profile, or the site is invalid.
    """
    if (fault := site_fault(site)) is not None or '"' in site or "\\" in site:
        raise FleetError(f"{fault or 'site must have no quotes and no backslash'}; choose another site", code="site-invalid")
    return heading(name) + "\n" + _text(name).replace(_SITE, f'"{site}"')


def load_profile(name: str, site: str = "home") -> Mappings:
    """Return the rules of a profile, see `read_profile`."""
    return parse_mappings(tomllib.loads(read_profile(name, site)), compile_path)


def _text(name: str) -> str:
    if name not in names():
        known = ", ".join(sorted((*names(), SPARKPLUG)))
        raise FleetError(f'there is no profile "{name}"; use one of {known}', code="profile-unknown")
    return (FOLDER / f"{name}.toml").read_text()
