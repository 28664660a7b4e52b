"""Two policies over one history: both are judged in one pass, and their transitions are compared.

Begin with ``replay.py``; ``diff.py`` compares.
"""
