"""Devices of a key group in memory, and their stored form.

It imports ``codec`` and ``jit``. ``fold`` and the packages above it import it. Begin with
``devices.py``; ``codec.py`` writes and reads the stored form.
"""
