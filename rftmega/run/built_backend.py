"""Builds the backend that a config names, and imports no other."""

from importlib import import_module
from typing import TYPE_CHECKING

from rftmega.config import RunConfig
from rftmega.config.capabilities import backend_of

if TYPE_CHECKING:
    from rftmega.run.placement.backend import Backend


def built_backend(config: RunConfig) -> "Backend":
    """Returns the backend that builds the models; only the module of this backend is imported."""
    chosen = backend_of(config)
    backend: Backend = getattr(import_module(chosen.module), chosen.name)()
    return backend
