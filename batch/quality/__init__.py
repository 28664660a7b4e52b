"""Data quality: run the suites of ``fleetpulse.core.quality`` over a home, and gate changes of the state by them.

It imports the library, ``batch.state`` and ``batch.common``. Begin with ``run.py``; ``facts.py`` has the inputs
beside the tables.
"""
