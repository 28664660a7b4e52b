"""Home, the folder of one installation: paths, locks, services, desired state, commands.

It imports ``checkpoints``, ``delta``, ``ingest``, ``mqtt`` and ``system``. ``tables`` and the
packages above it (``maintenance``, ``lifecycle``, ``kafka``, ``quality``, jobs) may import it.
Start reading with ``home.py``; ``services.py`` and ``exclusive.py`` explain the locks.
"""
