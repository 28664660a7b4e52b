"""Operating system: processes, locks, durable files, ports, the wall clock.

It imports no other package of ``io``. Every package of ``io`` and the layers above may import it.
Only ``kernel_cache.py`` imports ``fleetpulse.columnar``, whose compiled kernels it stores.
Start reading with ``process.py`` or ``fsync.py``.
"""
