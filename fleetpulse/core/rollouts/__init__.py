"""Firmware rollouts by cohort: the plan, the cohort of a device, the verdict about a cohort, the record of a rollout.

All of it is pure: `reports.rollouts` counts, `io.home.rollouts` stores, and ``fleet rollout`` combines them. Begin reading at
`plan.py`.
"""
