"""The trained model on Megatron-Core: built, wrapped, run through the pipeline schedule and stepped."""

from rftmega import device

device.prepare_megatron()

from rftmega.megatron.actor import MegatronActor  # noqa: E402
from rftmega.megatron.manager import MegatronModelManager  # noqa: E402

__all__ = ["MegatronActor", "MegatronModelManager"]
