"""``fleet chaos``: kill processes of a fleet under load, and account for messages.

It starts a real fleet in a temporary home, with the supervisor of ``fleet up``.
It imports ``cli.supervisor``, ``cli.common``, the jobs and the library; only tests and ``cli.app``
import it. Start reading at ``scenario.py``.
"""
