"""Rewards from the scores that reward and cost models give to whole completions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from rftmega.algorithms.supervised import last_value
from rftmega.config import RewardConfig
from rftmega.config.options.scoring_models import ScoringModel
from rftmega.core.errors import RewardError
from rftmega.core.interfaces import Host, OneProcess, ValueScorer
from rftmega.core.ragged import Ragged
from rftmega.core.types import Samples

Model = TypeVar("Model", bound=ValueScorer)


class ModelReward:
    """ModelReward adds the weighted score of a reward or cost model to the reward of each
    completion of a batch.
    """

    def __init__(self, model: ValueScorer, chosen: ScoringModel, host: Host | None = None):
        """`chosen`: weight and name of the score. `host`: keeps one copy of the model's input rows
        per host.
        """
        self.model, self.chosen = model, chosen
        self.host = host or OneProcess()

    def __call__(self, samples: Samples[Ragged]) -> Samples[Ragged]:
        """Returns the samples with the model's scores added; a score is the value after the
        completion's last token and is stored as a reward component.

        Raises RewardError if a score is not finite.
        """
        rows = self.host.once(samples.rows.with_end)
        rollouts = samples.rollouts
        last = rollouts.first + rollouts.sizes - 1  # its last row has the whole context
        score = last_value(self.model.values(rows), rows)[last][rollouts.of_row]
        if not bool(score.isfinite().all()):
            row = int((~score.isfinite()).nonzero()[0])
            raise RewardError(
                f"The model of {self.chosen.option}={self.chosen.path} gave {score[row].item()} for a completion of prompt "
                f"{samples.prompts[row].index}, and {int((~score.isfinite()).sum())} such score(s) of {len(score)}. Look at "
                "its weights."
            )
        parts = samples.reward_parts | {self.chosen.component: score}
        return replace(
            samples, reward=samples.reward + self.chosen.weight * score, reward_parts=parts
        )


def model_rewards(
    config: RewardConfig, models: Mapping[str, Model], host: Host
) -> tuple[ModelReward, ...]:
    """Returns the ModelReward of each model that the config names; `models`: name -> model."""
    return tuple(
        ModelReward(models[name], chosen, host) for name, chosen in config.scoring_models().items()
    )
