"""For every test."""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("rftmega", deadline=None)  # a timing never decides a test
settings.load_profile("rftmega")

_SILENCED = logging.root.manager.disable
_UMASK = os.umask(0o022)
os.umask(_UMASK)


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """A program that is run in this process may silence warnings or close new files to others; the next test must not know."""
    yield
    logging.disable(_SILENCED)
    os.umask(_UMASK)
