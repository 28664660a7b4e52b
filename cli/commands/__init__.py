"""Commands of ``fleet``: one module per command or group of commands.

A command reads arguments, calls a job or a report, and prints the results.
It imports ``cli.common``, ``cli.supervisor``, the jobs and the library; only ``cli.app`` and
``cli.entry`` import commands. Begin with ``cli/app.py``, then read ``inspect/status.py``.
"""
