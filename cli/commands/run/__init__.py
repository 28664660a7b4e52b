"""Verbs that start and stop processes: up, replay, down, service, stream, job, fetch, and the version.

Begin with ``run.py``; the processes themselves are watched in ``cli.supervisor``.
"""
