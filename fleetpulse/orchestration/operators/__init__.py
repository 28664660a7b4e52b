"""Airflow operators: verbs of the command ``fleet``, backtests and rollouts.

`dag_factory` and the DAGs import it. Begin with ``verbs.py``, whose operators run one verb as a process.
"""
