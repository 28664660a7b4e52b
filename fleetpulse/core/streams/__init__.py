"""Streams beside the lifecycle: connection sessions, vitals, and commands with their answers.

The definitions are pure, like the lifecycle's. `io.streams` runs them as queries of the lifecycle job's Spark
application. Begin reading at `names.py`.
"""
