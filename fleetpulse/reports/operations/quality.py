"""Results of data quality runs, from the tables."""

import json
from typing import Any, Final

from fleetpulse.core.quality.suites import Severity
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


def suite_outcomes(home: Home, last: int) -> list[dict[str, Any]]:
    """Count the expectations of each suite by outcome, for the newest runs; the newest run first.

    Returns:
        Rows with ``run_id``, ``began_at_ms``, ``subject``, ``suite``, ``passed``, ``failed``, ``skipped``, ``fault``,
        and ``failed_rows``, the number of rows that fail; ``critical`` is true if a critical expectation failed.
    """
    sql = f"""
        SELECT run_id, epoch_ms(any_value(began_at)) AS began_at_ms, any_value(subject) AS subject, suite,
            count(*) FILTER (outcome = 'passed') AS passed, count(*) FILTER (outcome = 'failed') AS failed,
            count(*) FILTER (outcome = 'skipped') AS skipped, count(*) FILTER (outcome = 'fault') AS fault,
            coalesce(sum(failed) FILTER (outcome = 'failed'), 0)::BIGINT AS failed_rows,
            bool_or(outcome IN ('failed', 'fault') AND severity = '{Severity.CRITICAL}') AS critical
        FROM quality_results WHERE {_NEWEST} GROUP BY run_id, suite ORDER BY run_id DESC, suite
    """
    return query(home, sql, [last], tables=[QUALITY_RESULTS.name])


def results_of_suite(home: Home, run_id: str, suite: str) -> list[dict[str, Any]]:
    """Return the result of each expectation of a suite in one run: failures first, then by name."""
    sql = """SELECT * FROM quality_results WHERE run_id = ? AND suite = ?
             ORDER BY outcome NOT IN ('failed', 'fault'), severity, expectation"""
    return query(home, sql, [run_id, suite], tables=[QUALITY_RESULTS.name])


def failed_rows_of(home: Home, run_id: str, suite: str) -> list[dict[str, Any]]:
    """Return the rows of a suite that failed in one run, with the parsed key and values as ``key`` and ``content``."""
    sql = "SELECT * FROM quality_failures WHERE run_id = ? AND suite = ? ORDER BY expectation, row_key"
    rows = query(home, sql, [run_id, suite], tables=[QUALITY_FAILURES.name])
    return [{**row, "key": json.loads(row["row_key"]), "content": json.loads(row["detail"])} for row in rows]
