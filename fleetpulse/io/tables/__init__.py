"""The tables of a home, read and written: bronze, snapshots, stream health, the outbox of verdicts.

It imports ``home``, ``checkpoints`` and ``delta``. Begin with ``tables.py``.
"""
