"""Presence: covered time, frontiers, presence time, gateways, device identities.

It imports `core.rows`, `core.times`, `core.messages.text` and `core.messages`. `core.device`, `core.fold`
and every package that may import ``core`` may import it.
Start reading with ``coverage.py``; ``presence_time.py`` decides which signals are late or have a
wrong clock.
"""
