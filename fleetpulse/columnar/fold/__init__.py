"""The fold of a key group: pending rows, their order, one call that judges them, and the judgements that it emits.

It imports ``state``, ``codec`` and ``jit``. Begin with ``key_group.py``.
"""
