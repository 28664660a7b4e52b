"""A home, the folder of one installation: its paths, locks, services, desired state and spool of commands.

It imports ``checkpoints``, ``delta``, ``ingest``, ``mqtt`` and ``system``. Begin with ``home.py``.
"""
