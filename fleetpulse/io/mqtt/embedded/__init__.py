"""Embedded MQTT broker: nats-server, its configuration and limits, and the readers of its log.

It imports the other modules of ``mqtt``. Of these, only ``acl.py`` imports it, for a name in ``broker_api.py``.
Start reading with ``broker.py``, which starts the server. The modules ``..._cleanup.py`` enforce limits per
user that the server does not have.
"""
