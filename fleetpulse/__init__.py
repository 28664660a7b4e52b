"""Library of fleetpulse: presence verdicts about IoT devices, from their messages.

The jobs (`streaming`, `batch`), the commands (`cli`) and the DAGs import it; it imports none of
them. Inside it, imports go one way: planning, reports, io, columnar, core. Begin with
``core/replay.py``, the definition of every verdict.
"""

__version__ = "0.1.0"
