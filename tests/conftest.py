"""Settings for all tests."""

from hypothesis import HealthCheck, settings

# These machines are noisy: how long an example takes says nothing about the code.
settings.register_profile("loopguard", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loopguard")
