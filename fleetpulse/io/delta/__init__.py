"""Delta protocol without Spark: log reader, commits, appends, detection of damaged files.

It imports ``system``. ``home`` and the packages above it (``tables``, ``maintenance``,
``lifecycle``, ``kafka``, ``quality``, reports and jobs) may import it.
Start reading with ``log.py``. docs/adr/0026 explains why appends are implemented here.
"""
