"""MQTT clients, the embedded broker, its access rules, and the Sparkplug decoder.

It imports ``system``. Within ``io``, every package except ``system`` and ``spark`` may import it;
jobs and commands may as well. Start reading with ``subscriber.py``, the client of the bridge.
The client has its own codec (``codec.py``) because paho takes thirty times the CPU for a message.
"""
