"""Columnar processing of key groups: encodings, state, fold, snapshots, backtests.

It imports `fleetpulse.core`, numpy, pyarrow and numba. `io`, `reports` and the jobs may import it;
`core` may not. Begin with ``fold/key_group.py``, which processes one batch of one key group.
"""
