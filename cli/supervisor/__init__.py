"""The processes of a run: started, watched, started again, stopped; Airflow beside them; the screen.

It imports ``cli.common``, the jobs and the library. Begin with ``processes.py``.
"""
