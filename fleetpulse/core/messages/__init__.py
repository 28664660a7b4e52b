"""Decoders of messages: fleetpulse format, mapped topics, Sparkplug B, recordings.

It imports the modules directly below ``fleetpulse.core``, except ``fold.py`` and those above it.
`core.presence` and every package that may import ``fleetpulse.core`` may import it.
Start reading with ``decode.py``.
"""
