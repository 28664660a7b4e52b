"""Operators, sensors, triggers, assets and notifications for the Airflow DAGs.

Only ``dags/`` may import it; no other part of the program needs Airflow (ADR 17). It imports the
library, but none of the jobs: a task runs the command ``fleet`` as a process. Begin with
``dag_factory.py``, which assembles the DAGs, then read ``operators/verbs.py``.
"""
