"""Operations on the state of the lifecycle job: snapshot, bootstrap, rescale etc.

The package imports the library and ``batch.common``; the commands (``cli``), the other batch jobs
and ``bench`` import it. Begin with ``operations.py``, then read ``generation.py``.
"""
