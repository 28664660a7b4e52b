"""Read-only commands: status, devices, transitions, listen, rewind, availability.

``plan`` is here as well. They read tables and status files, and change no home.
``cli.app`` imports each module when its command is called; other commands may import them.
Begin with ``status.py``, which registers all commands that have no module of their own.
"""
