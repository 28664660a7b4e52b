"""Queries of the streams beside the lifecycle, in the Spark application of the lifecycle job.

Each reads bronze and appends to a table of its own, with a checkpoint of its own. Begin reading at
`runner.py`; docs/adr/0047-streams-beside-the-lifecycle.md has the reasons.
"""
