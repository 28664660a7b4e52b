"""Verbs that only read: status, devices, transitions, listen, rewind, availability, plan.

Begin with the module that has the name of the verb; ``status.py`` has the short ones.
"""
