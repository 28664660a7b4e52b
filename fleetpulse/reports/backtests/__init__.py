"""Reports of a backtest: its numbers, and a page in HTML.

Commands and Airflow import them. Start reading with ``backtest.py``.
"""
