"""Parameters that several routes of the API have, each declared once."""

from typing import Final

from fleetpulse.web.api.openapi import Parameter, text, whole
from fleetpulse.web.queries import MOST_ROWS, MOST_TEXT

TEXT: Final = text("", most=MOST_TEXT)
DEVICE_ID: Final = Parameter("device_id", "id of the device, percent-encoded: a slash in it is `%2F`", TEXT, "path")
SITE: Final = Parameter("site", "site", TEXT)
CLASS: Final = Parameter("class", "class of the device", TEXT)
PLACES: Final = (SITE, CLASS, Parameter("gateway", "gateway of the device", TEXT))


def limited(noun: str, default: int = 50, most: int = MOST_ROWS) -> Parameter:
    """Return the parameter that `queries.limit_of` reads."""
    return Parameter("limit", f"maximum number of {noun}", whole("", 1, most, default))
