"""Embedded MQTT broker: nats-server, its configuration and limits, and the readers of its log.

It imports the other modules of ``mqtt``, which import of it the API of the server alone.
Start reading with ``broker.py``, which starts the server. The modules ``..._cleanup.py`` enforce limits per
user that the server does not have.
"""
