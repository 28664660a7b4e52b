"""Health of a batch, and the decisions of a supervisor, as functions of figures.

It imports the core alone. Begin with ``health.py``.
"""
