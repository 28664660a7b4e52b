"""Evaluation of data-quality suites: Great Expectations, and the tables it reads.

It imports ``tables``, ``home``, ``spark`` and ``system``; within ``io``, no package imports it.
The data-quality jobs in ``batch/quality`` and the commands may import it.
Start reading with ``great_expectations.py``; ``suite_inputs.py`` opens the tables.
"""
