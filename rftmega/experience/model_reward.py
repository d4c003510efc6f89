"""A reward model's word on whole answers."""

from dataclasses import replace

from rftmega.algorithms.supervised import last_value
from rftmega.interfaces import ValueModel
from rftmega.types import Samples


class ModelReward:
    """Adds `weight` times a reward model's score to the reward of every answer, once all of a rollout are there."""

    def __init__(self, model: ValueModel, weight: float):
        self.model, self.weight = model, weight

    def __call__(self, samples: Samples) -> Samples:
        """The score is the value after the answer's last token; as a part of the reward its name is "model"."""
        rows = samples.rows.with_end()
        score = last_value(self.model.values(rows), rows)
        parts = samples.reward_parts | {"model": score}
        return replace(samples, reward=samples.reward + self.weight * score, reward_parts=parts)
