"""EngineNumerics tells how exactly engine and trainer can agree, and lets all processes agree on
whether they do.
"""

from rftmega.megatron import MegatronActor
from rftmega.parallel.collectives import all_reduce


class EngineNumerics:
    """See `interfaces.Numerics`."""

    def __init__(self, actor: MegatronActor, *, is_main: bool):
        manager = actor.manager
        self.dtype = str(manager.config.params_dtype).removeprefix("torch.")
        self.has_experts = manager.description.experts is not None
        self.is_main = is_main

    def agreed(self, exceeded: bool) -> bool:
        """A collective over all processes."""
        return bool(all_reduce(int(exceeded), "max"))
