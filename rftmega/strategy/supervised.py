"""One model that learns from given rows: no engine, no turns to take."""

from pathlib import Path

from rftmega.config import RunConfig
from rftmega.megatron import MegatronActor, MegatronCritic
from rftmega.parallel.seeds import set_seed
from rftmega.parallel.topology import Topology
from rftmega.strategy.export import export


class SupervisedStrategy:
    """The policy (algorithm.task=sft) or a value model (reward_model) on Megatron-Core, in `model`."""

    def __init__(self, config: RunConfig):
        set_seed(config.trainer.seed)
        self.config = config
        self.topology = Topology.create(config.parallel, seed=config.trainer.seed)
        self.model: MegatronActor | MegatronCritic
        if config.algorithm.task == "sft":
            self.model = MegatronActor(config, self.topology)
        else:
            self.model = MegatronCritic(config, self.topology)

    def export(self, folder: str | Path) -> None:
        """Writes the model as a Hugging Face folder; every process calls it."""
        export(self.model, self.config, folder)
