"""Code that numba compiles, its cache on disk, and the matrices that it works on.

It imports ``fleetpulse.core`` alone. Begin with ``kernel.py``; ``cache.py`` says which sources a
cached kernel depends on.
"""
