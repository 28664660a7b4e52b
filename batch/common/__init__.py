"""Parts that several batch jobs share: the Spark session of a verb, and the lines that report its progress.

It imports the library alone. Begin with ``spark_session.py``.
"""
