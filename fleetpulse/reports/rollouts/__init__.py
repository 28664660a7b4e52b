"""Firmware rollouts of a home: the devices of a scope, the counts of a started cohort, and the steps of a rollout.

`core.rollouts` judges, `io.home.rollouts` stores. Begin reading at `steps.py`.
"""
