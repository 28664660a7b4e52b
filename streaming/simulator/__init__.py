"""The simulated fleet, and the publisher of a recording.

It imports the library alone. Begin with ``simulator.py``.
"""
