"""How far a home has come."""

from fleetpulse.core.tables import MESSAGES
from fleetpulse.io import delta
from fleetpulse.io.checkpoint import judged_up_to
from fleetpulse.io.home import Home
from fleetpulse.io.segments import position
from streaming.landing import WRITER


def judged_to_the_end(home: Home) -> bool:
    """Whether all that the bridge wrote has been landed and judged."""
    stands = position(home.segments)
    if stands is None:
        return True
    if not (home.table(MESSAGES.name) / "_delta_log").exists() or delta.landed(home, MESSAGES, WRITER) < stands.number:
        return False
    reached = judged_up_to(home.checkpoint)
    return reached is not None and reached[1] >= stands.received_at_ms
