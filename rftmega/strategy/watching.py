"""The observers that are on every process, since they look at all of them."""

import torch.distributed as dist

from rftmega import device
from rftmega.config import RunConfig
from rftmega.parallel.topology import Topology
from rftmega.strategy.measures import Measures
from rftmega.strategy.timeline import Timeline


def measures_of(config: RunConfig) -> list[Measures]:
    """What adds metrics."""
    given = config.logging.peak_tflops
    known = device.current().peak_tflops() if config.model.dtype != "float32" else None
    return [Measures(peak_tflops=given or known)]


def timeline_of(config: RunConfig, topology: Topology) -> list[Timeline]:
    """What records steps, where any are chosen."""
    if not config.logging.timeline:
        return []
    first, last = config.logging.timeline
    return [Timeline(f"{config.trainer.output}/timeline", first, last, label=label_of(topology))]


def label_of(topology: Topology) -> str:
    """As "rank 5: tensor 1, stage 1, data 0"."""
    place = f"tensor {topology.tensor_rank}, stage {topology.pipeline_rank}, data {topology.data_rank}"
    return f"rank {dist.get_rank()}: {place}"
