"""Files between the bridge and landing: segments, leases, recordings.

It imports ``system``. Within ``io``, the package ``home`` and the layers above it may import it;
``mqtt``, ``spark`` and ``system`` must not. The bridge, landing and commands use it.
Start reading with ``segments.py``; ``batch_decode.py`` decodes a segment to bronze columns.
"""
