"""``fleet state``: inspect, copy and replace the state of the lifecycle job.

They read options and take locks; the operations themselves are in ``batch.state``.
``cli.app`` imports ``commands.py`` when the command is called; no other package imports them.
Begin with ``commands.py``, then read ``session.py``.
"""
