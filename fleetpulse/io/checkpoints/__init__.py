"""The lifecycle job's checkpoints: their positions, and the record of generations.

It imports ``system``. Begin with ``generations.py``.
"""
