"""Data quality: run the suites over a home, and gate changes of its state.

The package imports the library, ``batch.state``, ``batch.backtest`` and ``batch.common``; the
commands (``cli``) and ``bench`` import it. Begin with ``run.py``, whose ``gate`` refuses a snapshot or
a new generation, then read ``facts.py``. The expectations are in ``fleetpulse/core/quality``.
"""
