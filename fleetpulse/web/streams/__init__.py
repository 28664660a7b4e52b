"""API and pages of the streams beside the lifecycle, and of firmware rollouts.

Rule: rows, states and verdicts come from `fleetpulse.reports.streams` and `fleetpulse.reports.rollouts`; a page and
the API show the same rows. Begin reading at `listing.py`.
"""
