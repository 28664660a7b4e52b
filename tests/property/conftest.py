"""Profiles: what CI runs is the same every time; at home, more and different."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("ci", max_examples=250, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("home", max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("ci" if os.environ.get("CI") else "home")
