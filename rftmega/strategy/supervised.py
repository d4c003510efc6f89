"""One model that learns from given rows: no engine, no turns to take."""

from pathlib import Path

from rftmega import weights
from rftmega.config import RunConfig
from rftmega.megatron import MegatronActor, MegatronCritic
from rftmega.parallel.seeds import set_seed
from rftmega.parallel.topology import Topology


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
        """Writes the model as a Hugging Face folder, a value model as a classifier of one label; every process calls it."""
        average = getattr(self.model, "average", None)
        self._export(folder)
        if average is not None:
            with average.swapped_in():
                self._export(f"{folder}_ema")

    def _export(self, folder: str | Path) -> None:
        exporter = weights.Exporter(
            self.model.manager.bound, self.topology, bucket_bytes=self.config.trainer.push_bucket_mib * 2**20
        )
        source = self.config.model.path
        weights.export_hf_folder(
            exporter, source, folder, write=self.topology.is_main, classifier=isinstance(self.model, MegatronCritic)
        )
