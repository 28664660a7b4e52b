"""Names of a backtest: its sides, its differences, and the figures of its page."""

from typing import Final

BEFORE, AFTER = "before", "after"  # sides: the policies in force, and the new one
ADDED, GONE, MOVED = CHANGES = ("added", "gone", "moved")  # differences of the verdicts
FIGURES: Final = "fleetpulse-backtest"  # name of the page's meta element with the figures as JSON
