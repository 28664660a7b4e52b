"""Profiles: the default suite and CI run the same examples every time; the long form runs more, and other ones.

Planted faults (``./fleet test mutants``) need no smaller example.
"""

import os

from hypothesis import HealthCheck, Phase, settings

from tests.form import FORM, Form

_ANY = list(HealthCheck)
settings.register_profile(Form.DEFAULT, max_examples=100, derandomize=True, deadline=None, suppress_health_check=_ANY)
settings.register_profile(Form.ALL, max_examples=250, derandomize=True, deadline=None, suppress_health_check=_ANY)
settings.register_profile(Form.LONG, max_examples=400, deadline=None, suppress_health_check=_ANY)
settings.register_profile("mutants", settings.get_profile(Form.ALL), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("FLEET_PROFILE") or FORM)
