"""Long-running jobs: simulator, bridge, landing, and the lifecycle job.

Only ``cli`` may import it. It imports the library ``fleetpulse``, neither ``batch`` nor ``cli``;
bridge, landing and simulator do not import each other. Begin with ``bridge/bridge.py`` and follow a
message: then ``landing/landing.py``, ``lifecycle.py``.
"""
