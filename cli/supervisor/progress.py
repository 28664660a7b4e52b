"""Progress of a home's landing and judging."""

from collections.abc import Iterator, Mapping

from fleetpulse.core.presence.identities import device_of
from fleetpulse.core.rows import Kind, Origin
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.command_spool import spooled
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.segments import BridgePosition, bridge_position, list_segments, read_segment
from streaming.landing.landing import landed_places
from streaming.landing.merge import place


def judged_to_the_end(home: Home) -> bool:
    """Return whether all rows that the bridges wrote are landed and judged."""
    positions = {name: position for name in home.bridges() if (position := bridge_position(home.segments_of(name))) is not None}
    return not positions or judged_through(home, positions)


def judged_through(home: Home, positions: Mapping[str, BridgePosition]) -> bool:
    """Return whether all rows up to the given bridge positions are landed and judged.

    Args:
        home: the home.
        positions: position of each bridge, by its name.
    """
    if not holds_table(home.table(MESSAGES.name)):
        return False
    places = landed_places(home, MESSAGES)
    if any(places[name] <= place(position.number, 0) for name, position in positions.items()):
        return False
    reached = judged_up_to(home.checkpoint)
    return reached is not None and reached[1] >= max(position.received_at_ms for position in positions.values())


def is_command_pending(home: Home, device_id: str, kind: Kind) -> bool:
    """Return whether a command about a device is spooled or not landed yet.

    Other rows that no device sent count, too. If this returns False, all landed rows are in their
    table: read the table after this call, not before it.
    """
    identity, suffix = home.identity(), f"/{kind.value}"
    topics = (topic for some in (spooled(home, include_taken=True), _to_land(home)) for topic in some)
    return any(topic.endswith(suffix) and device_of(topic, identity) == device_id for topic in topics)


def _to_land(home: Home) -> Iterator[str]:
    """Yield the topics of rows that have not landed, except messages of devices."""
    places = landed_places(home, MESSAGES)  # landing writes this table last
    for name in home.bridges():
        for number, path in list_segments(home.segments_of(name)):
            if place(number + 1, 0) <= places[name]:
                continue
            try:
                rows = read_segment(path).slice(max(0, places[name] - place(number, 0)))
            except FileNotFoundError:
                continue  # landed and deleted in the meantime
            pairs = zip(rows["topic"].to_pylist(), rows["origin"].to_pylist(), strict=True)
            yield from (topic for topic, origin in pairs if origin != Origin.MQTT)
