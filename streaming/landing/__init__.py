"""Landing: decodes the segments of all bridges and appends rows to the tables.

Only ``cli`` may import it; it imports the library, and no other job. It merges the segments in the
order of receipt and commits each row once. Begin with ``landing.py``; ``merge.py`` contains the
order, ``rows.py`` the decoding.
"""
