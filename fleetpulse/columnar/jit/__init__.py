"""Functions compiled by numba, their cache on disk, and their matrix layouts.

It imports `fleetpulse.core`, ``columnar.compute`` and ``fleetpulse.paths``; every other package of
`columnar` may import it. Begin with ``kernel.py`` (a row), then ``signals.py``, ``errors.py`` and
``transitions.py`` (its effects); ``cache.py`` documents the sources that a cached kernel depends on.
"""
