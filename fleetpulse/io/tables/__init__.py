"""Delta tables of a home: bronze, snapshots, stream health, and the outbox of judgements.

It imports ``home``, ``checkpoints`` and ``delta``. Within ``io``, only ``maintenance``,
``lifecycle``, ``kafka`` and ``quality`` may import it; reports and jobs may as well.
Start reading with ``tables.py``; ``bronze.py`` packs messages into blocks for the lifecycle job.
"""
