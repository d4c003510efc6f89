"""`observers_of` returns a run's observers in the order in which they are called. Metric writers
are called last, so that they write the metrics of all others.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rftmega.config import RunConfig
from rftmega.core.interfaces import Reward
from rftmega.core.types import Prompt, Rows, Sampling
from rftmega.monitoring.observers.alerts import Alerts
from rftmega.monitoring.observers.evaluate import (
    ACCURACY,
    Answering,
    Evaluate,
    Evaluation,
    metric_of,
)
from rftmega.monitoring.observers.evaluate_rows import HeldOut, cross_entropy_of, preference_of
from rftmega.monitoring.observers.exporting import Exporting
from rftmega.monitoring.observers.health import Divergence, MixedGroups, UndecidedLimit
from rftmega.monitoring.observers.metric_writers import JSONLines, Progress, TensorBoard
from rftmega.monitoring.observers.observer import Observer
from rftmega.monitoring.observers.publish import MLflow, Prometheus, Trackio, WandB
from rftmega.monitoring.observers.run_chat import RunChat
from rftmega.monitoring.observers.run_reports import RunReports
from rftmega.monitoring.observers.trained_order import TrainedOrder
from rftmega.monitoring.observers.trajectories import Grading, Trajectories


class Text(Protocol):
    """Text is the interface of a tokenizer that decodes token ids."""

    @property
    def chat(self) -> Any: ...  # data.Chat: conversion of messages to text

    def decode(self, ids: Sequence[int]) -> str: ...

    def pieces(self, ids: Sequence[int]) -> list[str]: ...


def evaluation_of_prompts(
    config: RunConfig, held_out: Mapping[str, Sequence[Prompt]], reward: Reward
) -> Evaluation:
    """Returns the evaluation that generates and scores completions of the prompts `held_out`, with
    the options trainer.eval_*.
    """
    chosen = config.trainer
    answering = Answering(
        chosen.eval_samples,
        Sampling(chosen.eval_temperature, chosen.eval_top_p, chosen.eval_top_k, chosen.eval_min_p),
        tuple(chosen.eval_pass_at),
        chosen.eval_accuracy,
    )
    return Evaluate(
        held_out,
        reward,
        answering,
        every=chosen.eval_every,
        last=chosen.steps,
        adapters=tuple(config.model.lora.evaluated),
    )


def evaluation_of_rows(config: RunConfig, held_out: Mapping[str, Rows], model: Any) -> Evaluation:
    """Returns the evaluation of the trained policy (algorithm.task=sft) or reward model on the
    given rows `held_out`.
    """
    judge = partial(cross_entropy_of if config.algorithm.task == "sft" else preference_of, model)
    return HeldOut(held_out, judge, every=config.trainer.eval_every, last=config.trainer.steps)


def observers_of(
    config: RunConfig,
    evaluation: Evaluation,
    text: Text,
    export: Callable[[str], None],
    *,
    is_main: bool,
    measures: Sequence[Observer] = (),
    grading: Grading | None = None,
) -> list[Observer]:
    """Returns the observers of a run in the order in which they are called.

    Only the main process writes. `export` is called on all processes with a folder after the last
    step. `measures`: observers that add metrics after the evaluation. `grading` returns the part of
    a response that rewards grade.
    """
    chosen, task = config.trainer, config.algorithm.task
    found: list[Observer] = [*([evaluation] if evaluation.held_out else []), *measures]
    if is_main:
        judged = evaluation.held_out if task in ("rl", "reward_model") else ()
        found += writers(
            config,
            {name: metric_of(name, ACCURACY) for name in judged},
            {name: metric_of(name, chosen.eval_accuracy) for name in judged if task == "rl"},
        )
    if is_main and task == "rl" and chosen.trajectories:
        folder, most_bytes = f"{chosen.output}/trajectories", chosen.trajectories_mib * 2**20
        found.append(
            Trajectories(
                folder,
                text.decode,
                text.pieces,
                every=chosen.trajectories,
                most_bytes=most_bytes,
                chat=RunChat.of(config, text.chat),
                warn=_warns(config),
                grading=grading,
            )
        )
    if is_main and chosen.max_staleness and not config.rollout.ahead:
        found.append(
            TrainedOrder(
                f"{chosen.output}/trained_order.jsonl",
                prompts_per_step=chosen.prompts_per_step,
                max_staleness=chosen.max_staleness,
                warn=_warns(config),
            )
        )
    found += [Divergence(config.faults.max_skipped_steps), UndecidedLimit()]
    if is_main and task == "rl":
        found.append(MixedGroups(compares_groups=config.algorithm.advantage.compares_group))
    if chosen.export:
        found.append(Exporting(lambda: export(config.exported), config.exports(), is_main=is_main))
    return found


def writers(
    config: RunConfig, accuracy: Mapping[str, str], means: Mapping[str, str]
) -> list[Observer]:
    """Returns the metric writers, the alerts and the progress bar. `accuracy` and `means`:
    evaluation set -> name of its accuracy metric and of its mean-score metric, which the progress
    bar shows.
    """
    output, chosen = config.trainer.output, config.logging
    found: list[Observer] = [
        JSONLines(f"{output}/metrics.jsonl", warn=_warns(config)),
        TensorBoard(f"{output}/tensorboard", warn=_warns(config)),
        Progress(config.trainer.steps, accuracy, means),
        Alerts(Path(output) / "metrics.jsonl"),
        RunReports(config),
    ]
    if chosen.wandb:
        found.append(WandB(chosen.wandb, config))
    if chosen.mlflow:
        found.append(MLflow(chosen.mlflow, config))
    if chosen.trackio:
        found.append(Trackio(chosen.trackio, config))
    if chosen.prometheus_port:
        found.append(Prometheus(chosen.prometheus_host, chosen.prometheus_port))
    return found


def _warns(config: RunConfig) -> bool:
    """Returns whether a failed write is logged as a warning instead of raised as an error."""
    return config.checkpoint.on_failure == "warn"
