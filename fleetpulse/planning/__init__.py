"""The capacity model: figures of a fleet, measured or given, and what it will need.

It imports ``reports`` and the library below. Begin with ``model.py``.
"""
