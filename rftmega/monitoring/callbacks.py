"""`callbacks_of` returns the callbacks of a run: observers, checkpointing, performance metrics and
the timeline.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rftmega.config import RunConfig
from rftmega.core.interfaces import Callback, Resumable
from rftmega.data.sampler import PromptOrder
from rftmega.monitoring.model_card import write_model_card
from rftmega.monitoring.observers.assemble import Text, observers_of
from rftmega.monitoring.observers.checkpointing import Checkpointing
from rftmega.monitoring.observers.evaluate import Evaluation
from rftmega.monitoring.observers.observer import AtEnd, Observer
from rftmega.monitoring.observers.replica_check import ReplicaCheck
from rftmega.monitoring.observers.reward_check import Extracting
from rftmega.monitoring.observers.run_summary import RunSummary
from rftmega.monitoring.observers.trajectories import Grading
from rftmega.monitoring.performance.stragglers import Stragglers
from rftmega.monitoring.performance.throughput import Throughput
from rftmega.monitoring.performance.timeline import Timeline
from rftmega.runtime import device


def callbacks_of(
    config: RunConfig,
    strategy: Any,
    parts: Mapping[str, Resumable],
    evaluation: Evaluation,
    text: Text,
    *,
    is_main: bool,
    grading: Grading | None = None,
    extracting: Extracting | None = None,
) -> list[Callback]:
    """Returns the callbacks of a run in the order in which they are called.

    `strategy`: the training strategy, which exports the model and has the checkpoints; `parts`: the
    components whose state is saved in checkpoints, by name; `evaluation`: the callback that
    evaluates the model; `text`: the tokenizer that trajectories are written with; `is_main`:
    whether this is the main process, the only one that writes metrics and trajectories; `grading`:
    returns the part of a response that rewards grade, see `trajectories.Grading`; `extracting`:
    returns the answers that rewards read, see `reward_check.Extracting`.
    """
    data = parts.get("data")
    found: list[Callback] = [
        *observers_of(
            config,
            evaluation,
            text,
            strategy.export,
            is_main=is_main,
            measures=measures_of(config),
            grading=grading,
            extracting=extracting,
            seen=lambda: data.epochs if isinstance(data, PromptOrder) else 0.0,
        )
    ]
    if is_main and config.trainer.export:  # after the export, which makes the folder
        metrics = Path(config.trainer.output) / "metrics.jsonl"
        found.append(AtEnd(lambda: write_model_card(config, metrics)))
    if config.faults.check_replicas_every:  # before a checkpoint of faulty weights
        found.append(
            ReplicaCheck(strategy.checkpoints.models, every=config.faults.check_replicas_every)
        )
    if config.checkpoint.every:  # after the observers whose output belongs to the checkpoint
        found.append(
            Checkpointing(
                strategy.checkpoints,
                parts,
                every=config.checkpoint.every,
                last=config.trainer.steps,
            )
        )
    if is_main:  # after all that it tells of
        found.append(RunSummary(config, list(evaluation.held_out)))
    return [*found, *timeline_of(config, strategy.label)]  # last, to record the others


def measures_of(config: RunConfig) -> list[Observer]:
    """Returns the observers that add performance metrics and warn of slow processes (stragglers)."""
    given = config.logging.peak_tflops
    known = device.current().peak_tflops() if config.model.dtype != "float32" else None
    return [Throughput(peak_tflops=given or known), Stragglers()]


def timeline_of(config: RunConfig, label: str) -> list[Timeline]:
    """Returns the observer that records a timeline of the range of steps in the option
    logging.timeline, as a list of one; an empty list if this option is not set. `label`:
    description of this process in the timeline.
    """
    if not config.logging.timeline:
        return []
    first, last = config.logging.timeline
    return [Timeline(f"{config.trainer.output}/timeline", first, last, label=label)]
