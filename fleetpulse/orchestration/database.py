"""Airflow's own database made ready: its tables, and the pools that our DAGs wait in.

Run as ``python -m fleetpulse.orchestration.database`` with Airflow's environment; again, it changes nothing.
"""

from fleetpulse.orchestration.pools import POOLS


def prepare() -> None:
    """Make or upgrade the tables, and the pools."""
    from airflow.models.pool import Pool
    from airflow.utils.db import initdb

    initdb()
    for name, (slots, meaning) in POOLS.items():
        Pool.create_or_update_pool(name, slots, meaning, include_deferred=False)


if __name__ == "__main__":
    prepare()
