"""Great Expectations, and the inputs of the suites as tables.

It imports ``tables`` and ``home``. Begin with ``great_expectations.py``.
"""
