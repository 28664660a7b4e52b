"""Adapters to Delta, DuckDB, Spark, Kafka, MQTT and the operating system.

They compute no verdict; that is the work of ``core`` and ``columnar``, which they import. All
other parts may import this package: ``reports``, ``planning``, ``orchestration``, the jobs, ``cli``.
Start reading with ``home/home.py`` (paths of a home), then ``tables/tables.py`` (its Delta tables).
"""
