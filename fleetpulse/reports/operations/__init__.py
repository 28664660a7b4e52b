"""Operation of a fleet: batches and processes, generations, data quality, coverage gaps, audited actions.

Commands, `batch`, `web` and `orchestration` import it. Begin with ``stream.py`` (the lifecycle job and the streams
beside it); ``agreement.py`` compares the judgements of the job with those of the definition.
"""
