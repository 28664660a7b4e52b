"""The devices of a key group in memory, and their stored form.

It imports ``codec`` and ``jit``. Begin with ``devices.py``; ``codec.py`` writes and reads the
stored form.
"""
