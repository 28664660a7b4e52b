"""Firmware rollouts by cohort: the plan, the cohort of a device, the verdict about a cohort, the record of a rollout.

All of it is pure: `io.home.rollouts` stores, and `reports.rollouts` counts and takes the steps. Begin reading at `plan.py`.
"""
