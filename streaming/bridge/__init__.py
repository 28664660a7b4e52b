"""The bridge: takes messages from a broker, orders and stamps them, writes segments, acknowledges, and reports gaps.

It imports the library alone. Begin with ``bridge.py``; ``sequencer.py`` has the rules, without I/O.
"""
