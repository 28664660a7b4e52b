"""Encodings: rows as Arrow batches, packed columns, wire format, hashes.

It imports ``jit`` for layouts and compiled helpers. Every other package of `columnar` may import
it, as may `io`, `reports` and the jobs. Begin with ``arrow.py``, which defines the schemas.
"""
