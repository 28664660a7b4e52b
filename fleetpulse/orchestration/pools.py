"""The pools in which tasks wait for one another.

Rule: whatever may take long is in one of them, and together they have fewer slots than tasks run at a time: so there is always
one for the task that looks after the stream.
"""

from typing import Final

STATE_POOL: Final = "fleet_state"
HEAVY_POOL: Final = "fleet_heavy"
POOLS: Final = {  # slots, and what they are for
    STATE_POOL: (1, "one thing at a time on the lifecycle job's checkpoint"),
    HEAVY_POOL: (2, "what takes long beside it; a task is left for the look at the stream each minute"),
}
