"""Maintenance of a home: join small files, remove old rows, snapshots and logs, and free what no reader needs.

It imports the library and ``batch.common``. Begin with ``maintain.py``; ``plan.py`` lists the
steps.
"""
