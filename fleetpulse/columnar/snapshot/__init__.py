"""State as a table: snapshot rows, key groups from them, bootstrap, checksums.

It imports ``fold``, ``state``, ``codec`` and ``jit``. ``warmup``, `io`, `reports`, `batch` and
`cli` import it. Begin with ``rows.py``, which converts between key groups and snapshot rows.
"""
