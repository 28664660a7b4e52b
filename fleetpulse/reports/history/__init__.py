"""History: the fleet and its devices as of past instants, availability, and the feed of changes.

It imports only ``reports.messages``; the reports beside it, commands, `batch` and `web` import it. Begin with ``time_travel.py``
(bitemporal queries); ``replay_origin.py`` finds the row or the snapshot from which a replay begins.
"""
