"""Form of this test run: default, all or long.

``./fleet test`` sets it. If pytest is called directly, the form is ``all``.
"""

import os
from typing import Final

from cli.dev.test_plan import FORM_VARIABLE, Form

FORM: Final = Form(os.environ.get(FORM_VARIABLE, Form.ALL))
IS_DEFAULT: Final = FORM is Form.DEFAULT
IS_LONG: Final = FORM is Form.LONG


def examples(count: int) -> int:
    """Return the number of examples of a property that is limited to ``count``: half of them in the default suite."""
    return count // 2 if IS_DEFAULT else count
