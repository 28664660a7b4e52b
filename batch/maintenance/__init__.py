"""Maintenance of a home: compact tables; remove old rows, snapshots and files.

The package imports the library, ``batch.amend`` and ``batch.state.prune``; only the commands
(``cli``) import it. Begin with ``maintain.py``; ``plan.py`` defines a step.
"""
