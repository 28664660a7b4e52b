"""Counts over time of messages that were quarantined, or decoded and not judged.

Rule: a row that stands for several messages counts as many.
"""

from typing import Any

from fleetpulse.core.judgements import LISTED
from fleetpulse.core.tables import JUDGEMENTS, QUARANTINE, literals
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query


def quarantined(home: Home, since_ms: int, bucket_ms: int) -> list[dict[str, Any]]:
    """Count the quarantined messages received since an instant, by span and reason.

    Args:
        home: home to read.
        since_ms: start of the first span, epoch milliseconds.
        bucket_ms: length of a span, milliseconds.

    Returns:
        Rows with ``from_ms``, ``reason`` and ``messages``, oldest first.
    """
    return query(home, _sql(QUARANTINE.name, "reason", bucket_ms), [since_ms], tables=[QUARANTINE.name])


def unjudged(home: Home, since_ms: int, bucket_ms: int) -> list[dict[str, Any]]:
    """Count the messages received since an instant that were not judged, by span and kind of judgement.

    See `quarantined` for the arguments and the rows; ``reason`` is the kind, such as ``late``.
    """
    source = f"(SELECT * FROM judgements WHERE kind IN ({literals(LISTED)}))"
    return query(home, _sql(source, "kind", bucket_ms), [since_ms], tables=[JUDGEMENTS.name])


def _sql(source: str, column: str, bucket_ms: int) -> str:
    return f"""SELECT epoch_ms(received_at) // {int(bucket_ms)} * {int(bucket_ms)} AS from_ms, {column} AS reason,
               sum(coalesce(messages, 1))::BIGINT AS messages FROM {source}
               WHERE epoch_ms(received_at) >= ? GROUP BY 1, 2 ORDER BY 1, 2"""
