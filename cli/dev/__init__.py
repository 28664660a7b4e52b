"""Verbs of contributors: test, lint, lock, bench, and the documents that are generated from code.

Begin with ``commands.py``; a run of the tests is planned in ``test_plan.py`` and run in
``test_run.py``.
"""
