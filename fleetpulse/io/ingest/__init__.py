"""Files between the bridge and landing: segments, leases, recordings, and the decoder of a segment.

It imports ``system``. Begin with ``segments.py``.
"""
