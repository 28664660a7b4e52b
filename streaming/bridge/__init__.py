"""The bridge: stamps MQTT messages, writes segments, reports coverage gaps.

Only ``cli`` may import it; it imports the library, and no other job. A message is acknowledged
after its segment is durable. Begin with ``bridge.py``, which does the I/O and decides when a segment
is written. ``sequencer.py`` contains the rules, without I/O: stamps, canaries and their ticks,
coverage gaps, acknowledgements.
"""
