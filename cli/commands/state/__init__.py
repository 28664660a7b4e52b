"""The verbs of ``fleet state``.

Begin with ``commands.py``; the operations are those of ``batch.state``.
"""
