"""Form of this test run, for tests with a shorter form.

``./fleet test`` sets it; the default, if pytest is called directly, is ``all``.
"""

import os
from typing import Final

from cli.dev.test_plan import FORM_VARIABLE, Form

FORM: Final = Form(os.environ.get(FORM_VARIABLE, Form.ALL))
IS_DEFAULT: Final = FORM is Form.DEFAULT
IS_LONG: Final = FORM is Form.LONG
