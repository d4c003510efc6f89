"""`observers_of` returns a run's observers (callbacks) in the order in which they are called: first
those that add metrics (evaluation, performance), then the writers of metrics, then the others.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rftmega.config import RunConfig
from rftmega.core.interfaces import Reward, Scorer
from rftmega.core.types import Metrics, Prompt, Rows, Sampling
from rftmega.monitoring.observers.alerts import Alerts
from rftmega.monitoring.observers.evaluate import (
    Answering,
    Evaluate,
    Evaluation,
    Report,
)
from rftmega.monitoring.observers.evaluate_rows import (
    HeldOut,
    cost_of,
    cross_entropy_of,
    preference_of,
)
from rftmega.monitoring.observers.evaluation_files import EvaluationFiles
from rftmega.monitoring.observers.evaluation_score import EvaluationScore, evaluation_scores
from rftmega.monitoring.observers.evaluation_table import EvaluationTable
from rftmega.monitoring.observers.exporting import Exporting
from rftmega.monitoring.observers.health import Divergence, MixedGroups, UndecidedLimit
from rftmega.monitoring.observers.metric_writers import JSONLines, TensorBoard
from rftmega.monitoring.observers.observer import Observer
from rftmega.monitoring.observers.progress import Progress
from rftmega.monitoring.observers.publish import MLflow, Prometheus, Trackio, WandB
from rftmega.monitoring.observers.reward_check import Extracting, RewardCheck
from rftmega.monitoring.observers.run_chat import RunChat
from rftmega.monitoring.observers.run_reports import RunReports
from rftmega.monitoring.observers.trained_order import TrainedOrder
from rftmega.monitoring.observers.trajectories import Grading, Trajectories
from rftmega.trainer import Algorithm
from rftmega.trainer.preference import Collate, evaluated


class Text(Protocol):
    """Text is the interface to a tokenizer that decodes token ids, all together (`decode`) or each
    by itself (`pieces`).
    """

    @property
    def chat(self) -> Any: ...  # data.Chat: conversion of messages to text

    def decode(self, ids: Sequence[int]) -> str: ...

    def pieces(self, ids: Sequence[int]) -> list[str]: ...


def evaluation_of_prompts(
    config: RunConfig,
    held_out: Mapping[str, Sequence[Prompt]],
    reward: Reward,
    text: Text,
    *,
    is_main: bool,
) -> Evaluation:
    """Returns the callback that evaluates the policy by generating completions of prompts and
    scoring them with `reward`, with the options trainer.eval_*. `held_out`: evaluation set's name
    -> its prompts; `text`: the tokenizer that completions are written with; `is_main`: whether this
    is the main process, the only one that writes them.
    """
    chosen = config.trainer
    reports: list[Report] = []
    if is_main and chosen.trajectories:
        reports.append(
            EvaluationFiles(f"{chosen.output}/evaluations", text.decode, warn=_warns(config))
        )
    if is_main and chosen.eval_shown:
        reports.append(EvaluationTable(text.decode, printed=chosen.eval_shown))
    return Evaluate(
        held_out,
        reward,
        answering_of(config),
        every=chosen.eval_every,
        last=chosen.steps,
        adapters=tuple(config.model.lora.evaluated),
        reports=reports,
    )


def answering_of(config: RunConfig) -> Answering:
    """Returns the settings of an evaluation in the options trainer.eval_*."""
    chosen = config.trainer
    return Answering(
        chosen.eval_samples,
        Sampling(chosen.eval_temperature, chosen.eval_top_p, chosen.eval_top_k, chosen.eval_min_p),
        tuple(chosen.eval_pass_at),
        chosen.eval_accuracy,
    )


def evaluation_of_rows(config: RunConfig, held_out: Mapping[str, Rows], model: Any) -> Evaluation:
    """Returns the callback that evaluates the trained `model` on given rows (sequences): the
    policy's cross-entropy for algorithm.task=sft, otherwise a reward model's accuracy on preference
    pairs. `held_out`: evaluation set's name -> its rows.
    """
    of_pairs = cost_of if config.algorithm.reward_model_loss == "cost" else preference_of
    judge = partial(cross_entropy_of if config.algorithm.task == "sft" else of_pairs, model)
    return HeldOut(held_out, judge, every=config.trainer.eval_every, last=config.trainer.steps)


def evaluation_of_preferences(
    config: RunConfig,
    held_out: Mapping[str, Sequence[Any]],
    policy: Scorer,
    collate: Collate,
) -> Evaluation:
    """Returns the callback that evaluates the trained `policy` on preference data: the loss, the
    accuracy and the implicit rewards. `held_out`: evaluation set's name -> its examples; `collate`
    makes rows of examples.
    """
    loss_fn = Algorithm(config).preference_loss()

    def judge(examples: Sequence[Any]) -> Metrics:
        return evaluated(policy, loss_fn, collate(examples))

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
    extracting: Extracting | None = None,
    seen: Callable[[], float] | None = None,
) -> list[Observer]:
    """Returns the observers of a run in the order in which they are called.

    `evaluation`: the callback that evaluates the model; `text`: the tokenizer that trajectories are
    written with; `export`: called on all processes after the last step, with the folder to write
    the model to; `is_main`: whether this is the main process, the only one that writes metrics and
    trajectories; `measures`: observers that add performance metrics; `grading`: returns the part of
    a response that rewards grade, see `trajectories.Grading`; `extracting`: returns the answers
    that rewards read, see `reward_check.Extracting`; `seen`: see `Progress`.
    """
    chosen, task = config.trainer, config.algorithm.task
    found: list[Observer] = [*([evaluation] if evaluation.held_out else []), *measures]
    if is_main:
        found += writers(
            config,
            evaluation_scores(config, evaluation.held_out),
            seen,
            next((each for each in evaluation.reports if isinstance(each, EvaluationTable)), None),
        )
    if is_main and task == "rl":
        found.append(RewardCheck(text.decode, grading=grading, extracting=extracting))
    if is_main and task == "rl" and chosen.trajectories:
        folder, most_bytes = f"{chosen.output}/trajectories", chosen.trajectories_mib * 2**20
        found.append(
            Trajectories(
                folder,
                text.decode,
                text.pieces,
                every=chosen.trajectories,
                last=chosen.steps,
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
    config: RunConfig,
    scores: Sequence[EvaluationScore],
    seen: Callable[[], float] | None = None,
    completions: EvaluationTable | None = None,
) -> list[Observer]:
    """Returns the observers that write or display metrics, and the alerts. `scores`: main scores of
    the evaluation sets, for the progress; `seen`: see `Progress`; `completions`: those of the last
    evaluation, for wandb.
    """
    output, chosen = config.trainer.output, config.logging
    found: list[Observer] = [
        JSONLines(f"{output}/metrics.jsonl", warn=_warns(config)),
        TensorBoard(f"{output}/tensorboard", warn=_warns(config)),
        Progress(config.trainer.steps, scores, seen),
        Alerts(Path(output) / "metrics.jsonl"),
        RunReports(config),
    ]
    if chosen.wandb:
        found.append(WandB(chosen.wandb, config, completions))
    if chosen.mlflow:
        found.append(MLflow(chosen.mlflow, config))
    if chosen.trackio:
        found.append(Trackio(chosen.trackio, config))
    if chosen.prometheus_port:
        found.append(Prometheus(chosen.prometheus_host, chosen.prometheus_port))
    return found


def _warns(config: RunConfig) -> bool:
    """Returns whether a failed write only logs a warning (checkpoint.on_failure=warn) instead of
    ending the run with an error.
    """
    return config.checkpoint.on_failure == "warn"
