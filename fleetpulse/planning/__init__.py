"""Capacity model: cores, memory and storage that a fleet needs.

It imports `fleetpulse.core` and `fleetpulse.io`. The commands (`cli`), `batch.calibrate` and
`bench` import it. Begin with ``model.py``; ``observed.py`` reads the figures of an existing home.
"""
