"""Form of this test run, for tests that have a shorter one: set by ``./fleet test``; all where pytest is called directly."""

import os
from typing import Final

from cli.dev.test_plan import FORM_VARIABLE, Form

FORM: Final = Form(os.environ.get(FORM_VARIABLE, Form.ALL))
IS_DEFAULT: Final = FORM is Form.DEFAULT
IS_LONG: Final = FORM is Form.LONG
