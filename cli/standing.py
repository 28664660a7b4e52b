"""How far a home has come."""

from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoint import judged_up_to
from fleetpulse.io.home import Home
from fleetpulse.io.segments import position
from streaming.landing import places_of
from streaming.merging import place


def judged_to_the_end(home: Home) -> bool:
    """Whether all that the bridges wrote has been landed and judged."""
    stand = {name: stands for name in home.bridges() if (stands := position(home.segments_of(name))) is not None}
    if not stand:
        return True
    if not (home.table(MESSAGES.name) / "_delta_log").exists():
        return False
    places = places_of(home, MESSAGES)
    if any(places[name] <= place(stands.number, 0) for name, stands in stand.items()):
        return False
    reached = judged_up_to(home.checkpoint)
    return reached is not None and reached[1] >= max(stands.received_at_ms for stands in stand.values())
