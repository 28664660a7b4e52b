"""Messages: decode a payload, by our format, by a mapping or by Sparkplug; the envelope of a recording.

It imports the core alone. Begin with ``decode.py``.
"""
