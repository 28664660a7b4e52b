"""State as a table of devices: rows of a snapshot, key groups begun from them, and their checksum.

It imports ``fold``, ``state`` and ``codec``. Begin with ``rows.py``.
"""
