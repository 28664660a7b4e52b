"""Backtests: judge one history under two policies and compare the transitions.

It imports ``fold`` and the packages below it. `reports` and the backtest job in `batch` import it.
Begin with ``replay.py``; ``diff.py`` compares the two sides.
"""
