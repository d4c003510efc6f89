"""Rewards from the scores that a reward model gives to whole completions."""

from dataclasses import replace

from rftmega.algorithms.supervised import last_value
from rftmega.core.errors import RewardError
from rftmega.core.interfaces import Host, OneProcess, ValueScorer
from rftmega.core.ragged import Ragged
from rftmega.core.types import Samples


class ModelReward:
    """Adds `weight` times a reward model's score to the reward of each completion of a batch.
    `host`: keeps one copy of the model's input rows per host.
    """

    def __init__(self, model: ValueScorer, weight: float, host: Host | None = None):
        self.model, self.weight = model, weight
        self.host = host or OneProcess()

    def __call__(self, samples: Samples[Ragged]) -> Samples[Ragged]:
        """Returns the samples with the reward model's scores added; a score is the value after the
        completion's last token and is stored as the reward component "model".

        Raises RewardError if a score is not finite.
        """
        rows = self.host.once(samples.rows.with_end)
        rollouts = samples.rollouts
        last = rollouts.first + rollouts.sizes - 1  # its last row has the whole context
        score = last_value(self.model.values(rows), rows)[last][rollouts.of_row]
        if not bool(score.isfinite().all()):
            row = int((~score.isfinite()).nonzero()[0])
            raise RewardError(
                f"The reward model gave {score[row].item()} for a completion of prompt {samples.prompts[row].index}, and "
                f"{int((~score.isfinite()).sum())} such score(s) of {len(score)}. Look at its weights (reward.model_path)."
            )
        parts = samples.reward_parts | {"model": score}
        return replace(samples, reward=samples.reward + self.weight * score, reward_parts=parts)
