"""The command ``fleet``: parse arguments, call jobs and library, print results.

It decides nothing about devices. It may import everything except ``fleetpulse.orchestration``;
only tests, ``bench`` and DAG tasks (as a process) use it.
Start reading at ``app.py`` (the verbs) and ``entry.py`` (exit codes and errors).
"""
