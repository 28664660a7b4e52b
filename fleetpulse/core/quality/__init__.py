"""Data-quality suites as data: expectations on tables and on the state, each an SQL condition with its reason.

It imports the core alone. Begin with ``suites.py``.
"""
