"""Verbs that run a batch job and end: amend, backtest, drill, maintain, quality.

Begin with the module that has the name of the verb.
"""
