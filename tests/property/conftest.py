"""One Hypothesis profile: no deadline, since a first call may compile, and few examples of many properties."""

from hypothesis import settings

settings.register_profile("lean", deadline=None, max_examples=40)
settings.load_profile("lean")
