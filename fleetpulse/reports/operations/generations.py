"""Report on the generations of the lifecycle job, with the result of the gate of each.

Rule: the record of generations decides what is current; the gate is the newest quality run about a generation.
"""

from typing import Any

from fleetpulse.core.quality.suites import Severity
from fleetpulse.core.tables import QUALITY_RESULTS
from fleetpulse.io.checkpoints.generations import CURRENT, PRUNED, RETIRED, Generation, Generations, load_generations
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query


def generations(home: Home) -> list[dict[str, Any]]:
    """Return the generations of a home, the newest first.

    Returns:
        Rows with ``number``, ``status``, ``made_by``, ``made_from``, ``asked_by``, ``key_groups``, ``form``,
        ``made_at_ms`` (None if unknown), ``switched_at_ms`` (start as the current generation; None if it never was),
        ``retired_at_ms``, ``batch`` (last batch of a retired one), and ``gate``: a row with the number of
        expectations by outcome and ``refused``, whether a critical one failed; None without a gate.
    """
    record = load_generations(home.lifecycle)
    found = sorted(record.known.values(), key=lambda one: -one.number) or [home.generation()]
    gates = _gates(home)
    return [
        {
            "number": one.number,
            "status": one.status,
            "made_by": one.made_by,
            "made_from": {name: value for name, value in one.made_from.items() if value is not None},
            "asked_by": one.asked_by,
            "key_groups": one.key_groups,
            "form": one.form,
            "made_at_ms": one.made_at_ms or None,
            "switched_at_ms": _switched_at_ms(record, one),
            "retired_at_ms": one.position.get("retired_at_ms"),
            "batch": one.position.get("batch"),
            "gate": gates.get(f"generation {one.number}"),
        }
        for one in found
    ]


def _switched_at_ms(record: Generations, one: Generation) -> int | None:
    """Return when a generation became current: its predecessor stopped at that time."""
    ran = [other for other in record.known.values() if other.number < one.number and other.position.get("retired_at_ms")]
    if one.status not in (CURRENT, RETIRED, PRUNED) or not ran:
        return None
    return record.retired_at_ms(max(ran, key=lambda other: other.number).number)


def _gates(home: Home) -> dict[str, dict[str, Any]]:
    sql = f"""SELECT subject, run_id, epoch_ms(any_value(began_at)) AS began_at_ms,
              count(*) FILTER (outcome = 'passed') AS passed, count(*) FILTER (outcome IN ('failed', 'fault')) AS failed,
              count(*) FILTER (outcome = 'skipped') AS skipped,
              bool_or(outcome IN ('failed', 'fault') AND severity = '{Severity.CRITICAL}') AS refused
              FROM quality_results WHERE subject LIKE 'generation %' GROUP BY subject, run_id ORDER BY run_id"""
    return {row["subject"]: row for row in query(home, sql, tables=[QUALITY_RESULTS.name])}
