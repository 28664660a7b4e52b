"""Verbs that change what the fleet is judged by: devices, policies, access.

Begin with the module that has the name of the verb.
"""
