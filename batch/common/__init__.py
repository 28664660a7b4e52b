"""Shared parts of batch jobs: their Spark session, and progress of long steps.

The package imports only the library; all batch jobs, the commands (``cli``) and ``bench`` import
it. Begin with ``spark_session.py``, then read ``progress.py``.
"""
