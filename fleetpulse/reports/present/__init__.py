"""The fleet at present: facts of every device, kept in a table and folded forward.

`batch.maintenance` writes the table, `cli` and the publisher read it. Begin with ``parts.py`` (the
definition) and ``fold.py`` (new rows); ``kept.py`` reads and writes the table, ``devices.py`` shows
it, and ``modes.py`` has the modes for publishing.
"""
