"""Airflow plugins. The setting ``plugins_folder`` names this folder.

Airflow loads every file of the folder by its path; no module imports this package.
It may import ``fleetpulse.orchestration``. Begin with ``fleet_pages.py``.
"""
