"""Profiles: CI runs the same examples every time, a home more and different ones; planted faults need no smaller example."""

import os

from hypothesis import HealthCheck, Phase, settings

settings.register_profile("ci", max_examples=250, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("home", max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("mutants", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("FLEET_PROFILE") or ("ci" if os.environ.get("CI") else "home"))
