"""Airflow pools that limit how many tasks run at a time.

Rule: each task that may take long belongs to a pool. The pools together have fewer slots than tasks
may run in parallel (`AIRFLOW__CORE__PARALLELISM`), so `fleet_supervise` always finds a free one.
"""

from typing import Final

STATE_POOL: Final = "fleet_state"
HEAVY_POOL: Final = "fleet_heavy"
POOLS: Final = {  # by name: slots and description
    STATE_POOL: (1, "one task at a time on the checkpoint of the lifecycle job"),
    HEAVY_POOL: (2, "other long tasks; one task slot remains free for fleet_supervise"),
}
