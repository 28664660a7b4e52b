"""Presence: covered time, frontiers, presence time, gateways, device identities.

It imports `core.rows`, `core.times` and `core.messages`; ``sending_order.py`` also imports `core.device`.
`core.device`, `core.fold` and every package that may import ``core`` may import it.
Start reading with ``coverage.py``; ``presence_time.py`` decides which signals are late or have a
wrong clock.
"""
