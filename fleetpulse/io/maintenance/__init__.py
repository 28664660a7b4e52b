"""Maintenance of tables and disk: compaction, vacuum, reader pins, cleanup of logs.

It imports ``tables``, ``home``, ``delta`` and ``system``. Begin with ``compaction.py``;
``readers.py`` says which versions are pinned.
"""
