"""Observers that detect a run which can't learn: non-finite gradients, equal rewards, or rewards
that could not be determined.
"""

import logging
from typing import Any

from rftmega.algorithms.groups import varied
from rftmega.core.errors import Diverged, RewardError
from rftmega.core.ragged import Ragged
from rftmega.core.types import Experience, Metrics, Samples
from rftmega.monitoring.observers.observer import Observer

SAME_REWARDS = 3  # steps in a row: a single batch may be all correct, or all wrong, by chance
MOST_UNDECIDED = 0.5  # share of a step's completions: a few are always too hard to compare
UNDECIDED = "_undecided"
log = logging.getLogger(__name__)


class Divergence(Observer):
    """Divergence is a callback that ends a run after `steps` successive steps in which all
    optimizer steps were skipped, since gradients were not finite. It runs on every process, after
    the metric writers.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self.streaks = {"": 0, "critic_": 0}

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        """Raises Diverged if all optimizer steps of the policy, or of the critic, were skipped in
        each of the last `steps` steps. Steps in which a model is frozen are not counted.
        """
        for model, streak in self.streaks.items():
            skipped = metrics.get(f"{model}skipped_steps", 0.0)
            taken = metrics.get(f"{model}optimizer_steps", 0.0)
            if not skipped and not taken:  # frozen in this step
                continue
            self.streaks[model] = 0 if taken else streak + 1
            if self.streaks[model] >= self.steps:
                raise Diverged(self._why(model, trainer.step))

    def _why(self, model: str, step: int) -> str:
        return (
            f"The {'critic' if model else 'model'} took no optimizer step in the last {self.steps} steps, up to step {step}: no "
            "gradient was finite (skipped_steps and loss in metrics.jsonl say since when). Its weights are as they were before. "
            "Lower optimizer.learning_rate, set optimizer.clip_grad, look at the rewards, and start from a checkpoint before "
            "that; faults.max_skipped_steps is how many such steps in a row a run may have."
        )


class MixedGroups(Observer):
    """MixedGroups is a callback that logs a warning, once per run, if all completions that are
    compared got equal rewards in SAME_REWARDS successive steps, so that the policy learns nothing.
    """

    def __init__(self, *, compares_groups: bool):
        """Stores the setting. `compares_groups`: whether the algorithm compares only completions of
        the same prompt (as GRPO does); then rewards count as equal even if they differ between
        prompts.
        """
        self.compares_groups = compares_groups
        self.streak, self.told = 0, False

    def on_experience(
        self, trainer: Any, samples: Samples[Ragged], experience: Experience[Ragged]
    ) -> None:
        group = samples.group if self.compares_groups else samples.group.new_zeros(len(samples))
        self.streak = 0 if bool(varied(samples.reward, group).any()) else self.streak + 1
        if self.streak < SAME_REWARDS or self.told:
            return
        self.told = True
        alike = (
            "the completions of each prompt score alike"
            if self.compares_groups
            else "all completions score alike"
        )
        log.warning(
            "In %d steps in a row %s (mean reward %.3g), so there is nothing to learn from them. Look at the completions "
            "(output/trajectories) and at reward.*: does the reward read the answer (answer_pattern, format, labels), are "
            "completions cut off (`truncated`, rollout.max_response_tokens), are the prompts all too hard or too easy "
            "(algorithm.dynamic_sampling.max_rounds asks for others), is the temperature near 0?",
            self.streak,
            alike,
            samples.reward.mean().item(),
        )


class UndecidedLimit(Observer):
    """UndecidedLimit is a callback that ends a run if a reward component could not be determined,
    for example because of timeouts, for too many completions. It runs on every process.
    """

    def on_step(self, trainer: Any, metrics: Metrics) -> None:
        """Raises RewardError if a reward component could not be determined for more than the share
        MOST_UNDECIDED of the step's completions.
        """
        for name, share in metrics.items():
            if name.startswith("reward_") and name.endswith(UNDECIDED) and share > MOST_UNDECIDED:
                part = name.removeprefix("reward_").removesuffix(UNDECIDED)
                raise RewardError(
                    f"reward.{part} could not tell whether {share:.0%} of the completions of step {trainer.step} are right: it "
                    f"took too long (reward.{part}_seconds) or its process died. They scored 0, so the policy would learn that "
                    "all of them are wrong. Score a few completions by hand, raise the limit, or free memory on the host."
                )
