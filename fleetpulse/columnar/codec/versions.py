"""Format versions of the stored form: the newest, and those that can be written."""

from typing import Final

STORED_FORM: Final = 6
WRITTEN_FORMS: Final = (4, 5, STORED_FORM)  # a release can write earlier versions too, which makes a rollback possible
