"""Format versions of the stored form: the newest, and those that can be written."""

from typing import Final

STORED_FORM: Final = 5
WRITTEN_FORMS: Final = (4, STORED_FORM)  # a release can write the previous version too, which makes a rollback possible
