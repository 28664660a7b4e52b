"""Registry of devices: entries, their corrections, and states in correction rows.

It imports the modules directly below ``fleetpulse.core``, except ``fold.py`` and those above it.
`core.fold`, `core.amendments` and every package that may import ``core`` may import it.
Start reading with ``registry.py``.
"""
