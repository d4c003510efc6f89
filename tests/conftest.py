"""For every test."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("rftmega", deadline=None)  # a timing never decides a test
settings.load_profile("rftmega")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A tool that is run in this process silences warnings, which the next test may wait for."""
    before = logging.root.manager.disable
    yield
    logging.disable(before)
