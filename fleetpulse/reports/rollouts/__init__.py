"""Facts about firmware rollouts: the devices of a scope, and the counts of a started cohort.

`core.rollouts` judges them. Begin reading at `scope.py`.
"""
