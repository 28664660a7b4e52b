"""Decoder of Sparkplug B payloads.

It imports only generated protobuf code and ``fleetpulse.core``, which makes rows of the values.
Every package that may import ``io.mqtt`` may import it.
Start reading with ``codec.py``; the rows are defined in ``core.messages.sparkplug``.
"""
