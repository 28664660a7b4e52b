"""Versions of the stored form: which is the newest, and which can still be written."""

from typing import Final

STORED_FORM: Final = 5
WRITTEN_FORMS: Final = (4, STORED_FORM)  # a release writes its own and the one before, so that it can be rolled out and back
