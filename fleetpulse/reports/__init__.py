"""Read models: what the tables say about devices, verdicts, messages and the job, for commands, DAGs and pages.

It imports ``io``, ``columnar`` and ``core``. Begin with ``judgements.py`` or ``devices.py``.
"""
