"""Read models over the tables of a home: devices, verdicts, messages, the job.

It imports `io`, `columnar` and `core`. The commands (`cli`), `batch`, `web` and `orchestration` import it.
Begin with ``judgements.py`` (transitions, one device), ``why.py`` (the explanation of a mode) or
``present/devices.py`` (the fleet at present). ``history`` answers for past instants, ``operations`` for the job.
"""
