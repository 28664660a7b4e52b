"""Batch jobs: state operations, quality, maintenance, amend, backtest, calibrate.

The package imports the library; the commands (``cli``) and ``bench`` import it. Begin with the
``__init__.py`` of a subpackage, or with ``amend.py``.
"""
