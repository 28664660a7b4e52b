"""MQTT: a receiving client of its own codec, a publisher on paho, the embedded broker, access rules, Sparkplug.

It imports ``system``. Begin with ``subscriber.py``; it decodes by itself since paho takes thirty
times the CPU for a message.
"""
