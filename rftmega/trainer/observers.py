"""Who watches a run, in the order in which they are told: what adds metrics comes before what writes them down."""

from collections.abc import Callable, Mapping, Sequence

from rftmega.config import RunConfig
from rftmega.interfaces import Reward
from rftmega.trainer.callbacks import AtEnd, JSONLines, Observer, Progress, TensorBoard
from rftmega.trainer.evaluate import Answering, Evaluate, metric_of
from rftmega.trainer.publish import Prometheus, WandB
from rftmega.trainer.supervised import HeldOut
from rftmega.trainer.trajectories import Trajectories
from rftmega.types import Metrics, Prompt, Rows


def reinforced(
    config: RunConfig,
    held_out: Mapping[str, Sequence[Prompt]],
    reward: Reward,
    export: Callable[[], None],
    *,
    decode: Callable[[Sequence[int]], str],
    pieces: Callable[[Sequence[int]], list[str]],
    is_main: bool,
    measures: Sequence[Observer] = (),
) -> list[Observer]:
    """Of a run with rollouts. Only the main process writes; `export` is called on all, after the last step; `measures` add
    metrics after the evaluation.
    """
    chosen = config.trainer
    answering = Answering(chosen.eval_samples, chosen.eval_temperature, tuple(chosen.eval_pass_at), chosen.eval_accuracy)
    found: list[Observer] = []
    if held_out:
        found.append(Evaluate(held_out, reward, answering, every=chosen.eval_every, last=chosen.steps))
    found += measures
    if is_main:
        found += writers(config, {name: metric_of(name, chosen.eval_accuracy) for name in held_out})
    if is_main and chosen.trajectories:
        folder, most_bytes = f"{chosen.output}/trajectories", chosen.trajectories_mib * 2**20
        found.append(Trajectories(folder, decode, pieces, every=chosen.trajectories, most_bytes=most_bytes))
    return [*found, *([AtEnd(export)] if chosen.export else [])]


def supervised(
    config: RunConfig,
    held_out: Mapping[str, Rows],
    judge: Callable[[Rows], Metrics],
    export: Callable[[], None],
    *,
    is_main: bool,
    measures: Sequence[Observer] = (),
) -> list[Observer]:
    """Of a run that learns from given rows; `judge` says what the model makes of held-out ones."""
    chosen = config.trainer
    found: list[Observer] = []
    if held_out:
        found.append(HeldOut(held_out, judge, every=chosen.eval_every, last=chosen.steps))
    found += measures
    if is_main:
        shown = held_out if config.algorithm.task == "reward_model" else ()
        found += writers(config, {name: metric_of(name, "accuracy") for name in shown})
    return [*found, *([AtEnd(export)] if chosen.export else [])]


def writers(config: RunConfig, shown: Mapping[str, str]) -> list[Observer]:
    """What writes the metrics down, and the progress, which shows of each held-out set the metric that `shown` names."""
    output, chosen = config.trainer.output, config.logging
    found: list[Observer] = [
        JSONLines(f"{output}/metrics.jsonl"),
        TensorBoard(f"{output}/tensorboard"),
        Progress(config.trainer.steps, shown),
    ]
    if chosen.wandb:
        found.append(WandB(chosen.wandb, config))
    if chosen.prometheus_port:
        found.append(Prometheus(chosen.prometheus_host, chosen.prometheus_port))
    return found
