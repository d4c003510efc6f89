"""A model of a run, as Hugging Face folders."""

from pathlib import Path

from rftmega import weights
from rftmega.config import RunConfig
from rftmega.megatron import MegatronActor, MegatronCritic, MegatronModelManager
from rftmega.parallel.topology import Topology


def export(model: MegatronActor | MegatronCritic, config: RunConfig, folder: str | Path) -> None:
    """Writes a policy, and beside it `folder`_ema where an average is kept, or a value model as a
    classifier of one label.

    Every process calls it, with the weights on the device.
    """
    model.manager.finish_param_sync()
    export_weights(model.manager, model.topology, config, folder)
    if isinstance(model, MegatronActor) and model.average is not None:
        with model.average.swapped_in():
            export_weights(model.manager, model.topology, config, f"{folder}_ema")


def export_weights(
    manager: MegatronModelManager, topology: Topology, config: RunConfig, folder: str | Path
) -> None:
    """The present weights alone."""
    exporter = weights.Exporter(
        manager.shards(),
        topology.replica_group,
        bucket_bytes=config.trainer.push_bucket_mib * 2**20,
    )
    weights.export_hf_folder(
        exporter,
        manager.cfg.model.path,
        folder,
        write=topology.is_main,
        classifier=manager.value_model,
    )
