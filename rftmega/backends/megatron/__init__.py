"""Megatron-Core backend: builds and wraps models, runs them through the pipeline schedule and takes
optimizer steps.
"""

import rftmega.runtime.device.before_megatron  # noqa: F401

# isort: split

from rftmega.backends.megatron.actor import MegatronActor
from rftmega.backends.megatron.backend import MegatronBackend
from rftmega.backends.megatron.critic import MegatronCritic
from rftmega.backends.megatron.manager import MegatronModelManager

__all__ = ["MegatronActor", "MegatronBackend", "MegatronCritic", "MegatronModelManager"]
