"""Checks of asynchronous training."""

from rftmega.config.capabilities import engine_of
from rftmega.config.schema import RolloutConfig, RunConfig


def asynchronous(config: RunConfig) -> list[str]:
    """Returns the conflicts of trainer.max_staleness, rollout.ahead, rollout.on_update and
    rollout.order with other options.
    """
    most, ahead = config.trainer.max_staleness, config.rollout.ahead
    found = []
    if ahead and most != 1:
        found.append(
            f"rollout.ahead=1 makes completions that are one version behind, and trainer.max_staleness={most}. Set it to 1."
        )
    if config.rollout.on_update != RolloutConfig.on_update and (ahead or not most):
        found.append(
            f"rollout.on_update={config.rollout.on_update} needs trainer.max_staleness above 0 without rollout.ahead: no "
            "request is in flight when weights change otherwise."
        )
    if config.rollout.order and (ahead or not most):
        found.append(
            f"rollout.order={config.rollout.order} needs trainer.max_staleness above 0 without rollout.ahead: groups are learnt "
            "in the order of their tasks otherwise, in every run. Leave it out."
        )
    if not most:
        return found
    if config.strategy != "separate":
        found += _colocated(config)
    if config.algorithm.dynamic_sampling.oversample > 1:
        found.append(
            f"trainer.max_staleness={most} keeps more groups under way than a step learns from by itself. Leave "
            "algorithm.dynamic_sampling.oversample at 1."
        )
    if config.algorithm.replay.max_age:
        found.append(
            f"trainer.max_staleness={most} does not go with algorithm.replay.max_age={config.algorithm.replay.max_age}: both "
            "learn from completions of earlier versions. Leave one at 0."
        )
    return found


def _colocated(config: RunConfig) -> list[str]:
    """Returns the conflicts of asynchronous training with colocated engines, which cannot use the
    device while the trainer trains.
    """
    rollout, found = config.rollout, []
    if rollout.ahead:
        found.append(
            "rollout.ahead=1 needs strategy=separate: colocated engines have no device while the trainer learns. "
            "trainer.max_staleness=1 without it is for them."
        )
    if rollout.on_update != RolloutConfig.on_update:
        found.append(
            f"rollout.on_update={rollout.on_update} needs strategy=separate: what colocated engines have under way is broken "
            "off, and its cache computed again. Leave it out."
        )
    if not engine_of(rollout).side_by_side:
        found.append(
            f"trainer.max_staleness={config.trainer.max_staleness} with strategy=colocated interrupts completions, which "
            "rollout.engine=transformers can't: it gives one after the other. Set it to vllm."
        )
    if rollout.stop:
        found.append(
            f"rollout.stop={rollout.stop} does not go with trainer.max_staleness above 0 and strategy=colocated: a string that "
            "spans the place at which a completion was interrupted would not be seen. Leave one out."
        )
    return found
