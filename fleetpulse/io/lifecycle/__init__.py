"""Streaming query of the lifecycle job, and the reader of its state.

It imports ``spark``, ``tables``, ``home`` and the packages below them. Within ``io``, no other
package imports it, except that ``spark.session`` names its Python daemon; jobs and commands may.
Start reading with ``query.py``; ``group_task.py`` runs the fold of one key group.
"""
