"""Landing: merges the segments of all bridges in the order of receipt, decodes them, and appends to the tables.

It imports the library alone. Begin with ``landing.py``.
"""
