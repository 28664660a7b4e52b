"""Data quality: run the suites over a home, and gate changes of its state.

The package imports the library, ``batch.state``, ``batch.backtest`` and ``batch.common``; the
commands (``cli``) and ``bench`` import it. Begin with ``run.py``, then read ``facts.py``.
"""
