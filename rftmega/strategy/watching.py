"""Who watches a run: the trainer's observers, and those that look at all processes."""

from typing import Any

import torch.distributed as dist

from rftmega import device
from rftmega.config import RunConfig
from rftmega.interfaces import Resumable
from rftmega.parallel.topology import Topology
from rftmega.strategy.measures import Measures
from rftmega.strategy.stragglers import Stragglers
from rftmega.strategy.timeline import Timeline
from rftmega.trainer.callbacks import Observer
from rftmega.trainer.checkpointing import Checkpointing, resume
from rftmega.trainer.evaluate import Evaluation
from rftmega.trainer.observers import Text, observers_of


def watch(
    trainer: Any, strategy: Any, config: RunConfig, order: Resumable, evaluation: Evaluation, text: Text, *, is_main: bool
) -> None:
    """Gives `trainer` its callbacks; where checkpoint.* says so it goes on, with `order` and models, from a checkpoint."""
    chosen, checkpoints, parts = config.checkpoint, strategy.checkpoints, {"data": order, "trainer": trainer}
    watching = observers_of(config, evaluation, text, strategy.export, is_main=is_main, measures=measures_of(config))
    if (chosen.every or chosen.resume not in ("auto", "none")) and (state := checkpoints.resume()) is not None:
        resume(trainer, parts, state)
    if chosen.every:  # after what watches a step, which is saved with it
        watching.append(Checkpointing(checkpoints, parts, every=chosen.every, last=config.trainer.steps))
    trainer.callbacks = [*watching, *timeline_of(config, strategy.topology)]  # after all that it records


def measures_of(config: RunConfig) -> list[Observer]:
    """What adds metrics, and warns of what they say."""
    given = config.logging.peak_tflops
    known = device.current().peak_tflops() if config.model.dtype != "float32" else None
    return [Measures(peak_tflops=given or known), Stragglers()]


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
