"""Rules for actions of operators: audit records, filters of devices, secrets, and defaults of the broker.

Verdicts do not depend on them. Start reading with ``audit.py``.
"""
