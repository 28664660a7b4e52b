"""Encodings: rows as Arrow batches, packed columns, blocks on the wire, hashes, versions of the stored form.

It imports ``jit`` for layouts and compiled helpers. Begin with ``arrow.py``.
"""
