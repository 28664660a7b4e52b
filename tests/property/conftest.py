"""Profiles: the default suite and CI run the same examples every time; the long form runs more, and other ones."""

from hypothesis import HealthCheck, settings

from tests.form import FORM, Form

_ANY = list(HealthCheck)
settings.register_profile(Form.DEFAULT, max_examples=100, derandomize=True, deadline=None, suppress_health_check=_ANY)
settings.register_profile(Form.ALL, max_examples=250, derandomize=True, deadline=None, suppress_health_check=_ANY)
settings.register_profile(Form.LONG, max_examples=400, deadline=None, suppress_health_check=_ANY)
settings.load_profile(FORM)
