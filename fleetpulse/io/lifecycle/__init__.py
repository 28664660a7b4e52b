"""The streaming query of the lifecycle job: source, stateful processor, state variables, sink, checkpoint repair.

It imports ``spark``, ``tables``, ``home`` and what they import. Begin with ``query.py``.
"""
