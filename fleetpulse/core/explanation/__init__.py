"""Explanation of verdicts: why a device changed its mode, and what would have prevented it.

The package imports the rest of `core`; `reports` imports it. Begin with ``explainers.py`` (one explainer for
each trigger); ``recorder.py`` records the definition while it judges.
"""
