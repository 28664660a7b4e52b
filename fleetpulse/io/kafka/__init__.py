"""Kafka source of the bridge, with the interface of the MQTT receiver.

It imports ``spark``, ``mqtt`` and ``system``. Within ``io``, no other package may import it;
the commands start a bridge with it.
Start reading with ``subscriber.py``; ``config.py`` checks the setting ``kafka``.
"""
