"""Monitoring of the lifecycle job: batch health and supervisor decisions.

It imports only `core.times`, and has pure functions: the callers measure.
`io`, `reports` and `orchestration` import it; every package that may import ``core`` may do so.
Start reading with ``health.py``; ``supervision.py`` decides about restarts.
"""
