"""Read models over the tables of a home: devices, verdicts, messages, the job.

It imports `io`, `columnar` and `core`. The commands (`cli`), `batch` and `orchestration` import it.
Begin with ``devices.py`` (the fleet at present) or ``judgements.py`` (transitions, one device).
``agreement.py`` compares the judgements of the job with those of the definition.
"""
