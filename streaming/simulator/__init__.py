"""The simulated fleet, and the publisher that replays a recording.

Only ``cli`` may import it; it imports the library, and no other job. Its history is replayed as
fast as the bridge takes it; then it sends live messages in real time. Begin with ``simulator.py``;
``replay_publisher.py`` publishes the lines of a recording.
"""
