"""Results of data quality runs, from the tables."""

from typing import Any, Final

from fleetpulse.core.tables import QUALITY_FAILURES, QUALITY_RESULTS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query

_NEWEST: Final = "run_id IN (SELECT DISTINCT run_id FROM quality_results ORDER BY run_id DESC LIMIT ?)"


def quality_runs(home: Home, last: int) -> list[dict[str, Any]]:
    """Return the newest runs: expectations by outcome, and the most severe failure."""
    sql = f"""
        SELECT run_id, any_value(began_at) AS began_at, any_value(subject) AS subject,
            count(DISTINCT suite) AS suites,
            count(*) FILTER (outcome = 'passed') AS passed, count(*) FILTER (outcome = 'failed') AS failed,
            count(*) FILTER (outcome = 'skipped') AS skipped, count(*) FILTER (outcome = 'fault') AS fault,
            min_by(concat(suite, ': ', expectation), severity) FILTER (outcome IN ('failed', 'fault')) AS first
        FROM quality_results WHERE {_NEWEST} GROUP BY run_id ORDER BY run_id DESC
    """
    return query(home, sql, [last], tables=[QUALITY_RESULTS.name])


def results_of(home: Home, last: int) -> list[dict[str, Any]]:
    """Return the result of each expectation in the newest runs."""
    sql = f"SELECT * FROM quality_results WHERE {_NEWEST} ORDER BY run_id DESC, suite, expectation"
    return query(home, sql, [last], tables=[QUALITY_RESULTS.name])


def failed_rows(home: Home, last: int) -> list[dict[str, Any]]:
    """Return the failed rows of the newest runs."""
    sql = f"SELECT * FROM quality_failures WHERE {_NEWEST} ORDER BY run_id DESC, suite, expectation, row_key"
    return query(home, sql, [last], tables=[QUALITY_RESULTS.name, QUALITY_FAILURES.name])
