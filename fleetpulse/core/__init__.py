"""Domain logic of fleetpulse: pure functions and values.

It has no clock, file or socket.
It imports the standard library only; every other package may import it.
Start reading with ``lifecycle.py`` (modes and transitions), then ``fold.py`` (one device) and
``replay.py`` (a history). docs/concepts/semantics.md specifies the results.
"""
