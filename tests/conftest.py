"""For every test."""

from hypothesis import settings

settings.register_profile("rftmega", deadline=None)  # a timing never decides a test
settings.load_profile("rftmega")
