"""Presence: coverage and gaps, shards of sites, presence time, gateways, identities of devices.

It imports the core alone. Begin with ``coverage.py``; ``presence_time.py`` judges clocks.
"""
