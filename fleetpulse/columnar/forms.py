"""Versions of the stored form: which is the newest, and which can still be written."""

from typing import Final

STORED_FORM: Final = 4
WRITTEN_FORMS: Final = (3, STORED_FORM)  # a release writes its own and the one before, so that it can be rolled out and back
UNRECORDED_FORM: Final = 3  # of generations that were begun before there was a record of them
