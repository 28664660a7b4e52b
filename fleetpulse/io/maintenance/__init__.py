"""Maintenance of Delta tables and the disk: compaction, vacuum, reader pins, cleanup.

It imports ``tables``, ``home``, ``delta``, ``checkpoints``, ``spark`` and ``system``. ``lifecycle``,
``kafka``, ``quality``, the jobs, ``orchestration`` and ``cli`` may import it.
Start reading with ``compaction.py`` (bronze) and ``vacuum.py`` (all other tables); ``readers.py``
defines the versions that must be kept.
"""
