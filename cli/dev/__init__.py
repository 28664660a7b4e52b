"""Verbs of contributors: test, lint, lock, bench; and generation of documents.

``test_plan.py`` plans a run of the tests, ``test_run.py`` runs it, and ``docgen.py`` generates
documents from code. Only tests and ``cli.app`` import this package.
Start reading at ``commands.py``.
"""
