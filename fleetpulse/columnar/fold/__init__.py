"""Fold of a key group: lateness, pending rows, judging order, judgements.

It imports ``state``, ``codec`` and ``jit``. ``backtest``, ``snapshot``, ``warmup``, `io` and
`batch` import it. Begin with ``key_group.py``; ``judge.py`` calls the compiled fold.
"""
