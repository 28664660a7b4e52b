"""Operations on the state of the lifecycle job: snapshot, bootstrap, migrate, repartition, rescale, roll back, canary.

It imports the library and ``batch.common``. Begin with ``operations.py``; a
generation is made in ``generation.py``.
"""
