"""Reports of the streams beside the lifecycle, from their tables.

Each module reads the table of one stream: ``sessions.py`` the connections of devices.
"""
