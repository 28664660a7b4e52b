"""Supervisor of a run: start, watch, restart and stop its processes; show them.

Airflow and the class archive of Spark are optional processes of a run.
It imports ``cli.common``, the jobs and the library; ``cli.chaos`` and ``cli.commands`` import it.
Start reading at ``up.py``, which decides the order of the processes; ``processes.py`` watches and
restarts them.
"""
