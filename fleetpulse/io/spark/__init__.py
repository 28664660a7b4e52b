"""Spark sessions and their prerequisites: Java, JARs, class archives, scratch.

It imports ``system``. Within ``io``, the packages ``lifecycle``, ``kafka``, ``quality`` and
``maintenance`` use it; ``mqtt`` and ``system`` must not. Jobs and commands may import it.
Start reading with ``session.py``, which sets up a session.
"""
