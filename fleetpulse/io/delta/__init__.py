"""The Delta protocol without Spark: log, commits, appends, and errors of damaged tables.

It imports ``system``. Begin with ``log.py``; docs/adr/0026 says why this is written by hand.
"""
