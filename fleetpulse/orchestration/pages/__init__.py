"""Pages inside Airflow, behind Airflow's login.

The plugin in ``plugins/`` imports it. Begin with ``serving.py``; ``operations_page.py`` mounts the application of
``./fleet serve``.
"""
