"""HTTP server of a home: the read-only API, the metrics and the operations page.

`cli` starts it, and Airflow mounts the same application behind its login. Begin with ``app.py`` (the
routes); ``live.py`` has the facts in memory, ``access.py`` decides which user may read, ``queries.py``
has filters, sorting and paging. The package ``api`` answers programs, ``pages`` answers people.
"""
