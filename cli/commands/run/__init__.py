"""Commands that start and stop processes: up, replay, down, service, stream, job.

Also ``fetch`` and ``version``. They use ``cli.supervisor``, which runs ``fleet job`` as processes.
``cli.app`` imports each module when its command is called; ``cli.entry`` imports ``job.py``.
Begin with ``run.py``, then read ``job.py``.
"""
