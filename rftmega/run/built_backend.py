"""Builds the backend that a config names, and imports no other."""

from importlib import import_module
from typing import Any

from rftmega.config import RunConfig
from rftmega.config.capabilities import backend_of


def built_backend(config: RunConfig) -> Any:
    """Returns the backend that builds the models, a `run.placement.backend.Backend`; only the module
    of this backend is imported.
    """
    chosen = backend_of(config)
    return getattr(import_module(chosen.module), chosen.name)()
