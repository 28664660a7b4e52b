"""Create or upgrade Airflow's own database, with the pools of the DAGs; revoke page addresses.

Run ``python -m fleetpulse.orchestration.database`` in Airflow's environment. It is idempotent.
"""

from fleetpulse.orchestration.config import CONFIG
from fleetpulse.orchestration.pools import POOLS


def prepare() -> None:
    """Create or upgrade the tables and the pools, and revoke all page addresses issued before."""
    from airflow.models.pool import Pool
    from airflow.utils.db import initdb

    CONFIG.pages_key.unlink(missing_ok=True)
    initdb()
    for name, (slots, meaning) in POOLS.items():
        Pool.create_or_update_pool(name, slots, meaning, include_deferred=False)


if __name__ == "__main__":
    prepare()
