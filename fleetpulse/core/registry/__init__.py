"""The registry of devices: its entries, corrections of them, and a device as a correction row carries it.

It imports the core alone. Begin with ``registry.py``.
"""
