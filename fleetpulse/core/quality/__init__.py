"""Data-quality suites as data: expectations on tables and on the state, as SQL.

It imports the modules directly below ``fleetpulse.core``, and `core.presence`.
`io.quality` (which evaluates the suites), `batch.quality` and `cli` import it; `core` does not.
Start reading with ``suites.py``; ``table_suites.py`` lists all suites in ``SUITES``.
``tests/unit/batch/quality/test_run.py`` has a planted defect for each expectation.
"""
