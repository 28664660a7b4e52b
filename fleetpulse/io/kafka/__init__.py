"""Kafka as a source of messages.

It imports ``spark`` and ``mqtt``. Begin with ``subscriber.py``; ``config.py`` checks the setting.
"""
