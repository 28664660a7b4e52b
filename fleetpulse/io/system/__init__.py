"""The operating system: processes, locks, files that survive a loss of power, ports, the wall clock.

It imports nothing of ``fleetpulse.io``. Begin with ``process.py`` or ``fsync.py``.
"""
