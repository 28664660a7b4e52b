"""Commands about devices, policies, mappings and access rights.

They spool commands for the bridge, or write the access rules of the embedded broker.
``cli.app`` imports each module when its command is called; no other package imports them.
Begin with ``device.py``.
"""
