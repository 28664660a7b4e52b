"""Checkpoints of the lifecycle job: positions, and the record of generations.

It imports ``system`` and the version of the stored form from ``columnar``. ``home`` and the
packages above it (``tables``, ``maintenance``, ``lifecycle``, jobs, ``cli``) may import it.
Start reading with ``generations.py``; ``checkpoint.py`` reads the files that Spark writes, and
``relocate`` in it updates their paths after a home was moved or copied.
"""
