"""Spark's session and what it needs: Java, JARs, kept classes, scratch folders.

It imports ``system``. Begin with ``session.py``.
"""
