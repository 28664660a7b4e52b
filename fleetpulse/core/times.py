"""Parsing and formatting of durations and instants.

Rule: in the code, instants are epoch milliseconds (UTC) and durations milliseconds, both of type
``int``, with names that end in ``_ms``.
"""

import re
from datetime import UTC, datetime
from typing import Final

from fleetpulse.core.errors import FleetError

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
DAY_S: Final = DAY_MS // 1_000
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": HOUR_MS, "d": DAY_MS}
_DURATION: Final = re.compile(r"(\d+)(ms|s|m|h|d)")
EPOCH_2000_MS: Final = 946_684_800_000  # no device is older: an earlier ts is a clock fault
_DIGITS: Final = 18  # longest number to parse: Python rejects numbers of thousands of digits
END_OF_TIME_MS: Final = 253_402_300_799_999  # 9999-12-31T23:59:59.999Z, the last instant that the tables can store
RECORDED_MS: Final = range(EPOCH_2000_MS, 4_102_444_800_000)  # up to 2100: valid ``received_at`` of recorded lines


def parse_duration_ms(text: str) -> int:
    """Parse a duration such as ``90s``, ``60m`` or ``1h30m``.

    Returns:
        Whole milliseconds, never negative.

    Raises:
        FleetError: not a duration.
    """
    parts = _DURATION.findall(text.strip())
    if not parts or "".join(number + unit for number, unit in parts) != text.strip():
        raise FleetError(
            f'a duration must be a number and a unit (ms, s, m, h, d); got "{text}"; write one such as "5m"',
            code="duration-invalid",
        )
    return sum(int(number) * _UNITS_MS[unit] for number, unit in parts)


def format_duration(duration_ms: int) -> str:
    """Format a duration: ``5400000`` is ``1h30m``; the inverse of `parse_duration_ms`."""
    sign, rest, text = ("-" if duration_ms < 0 else ""), abs(duration_ms), ""
    for unit in ("d", "h", "m", "s", "ms"):
        count, rest = divmod(rest, _UNITS_MS[unit])
        if count:
            text += f"{count}{unit}"
    return sign + (text or "0s")


def format_instant(instant_ms: int) -> str:
    """Format an instant as ISO 8601 in UTC: ``2021-09-02T13:35:06.724Z``."""
    moment = datetime.fromtimestamp(instant_ms // 1000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{instant_ms % 1000:03d}Z"


def parse_instant_ms(text: str) -> int:
    """Parse an instant: ISO 8601 with a zone, or epoch milliseconds.

    Raises:
        FleetError: neither of the two, or without a zone.
    """
    if text.isdecimal() and len(text) <= _DIGITS:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise FleetError(
            f'an instant must be ISO 8601 with a zone, or epoch milliseconds; got "{text}"; write it like "2026-01-31T12:00:00Z"',
            code="instant-invalid",
        )
    since_epoch = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return since_epoch.days * DAY_MS + since_epoch.seconds * 1_000 + since_epoch.microseconds // 1_000
