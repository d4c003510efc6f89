"""Rollouts of one step, laid out as rows."""

from collections.abc import Sequence

import torch

from rftmega.interfaces import Reward
from rftmega.media.placed import RowPictures
from rftmega.ragged import Ragged
from rftmega.rollout_arrays import RolloutArrays
from rftmega.types import Prompt, Rollout, Rows, Samples


def complete(rollouts: Sequence[Rollout | None]) -> Sequence[Rollout]:
    """Returns the rollouts of an engine that was to finish all of them."""
    assert None not in rollouts, "the engine left rollouts out"
    return rollouts  # type: ignore[return-value]


def scores_of(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], reward: Reward
) -> list[dict[str, float]]:
    """Returns the scores that rollouts carry; where one carries none, asks the reward for all of
    them.
    """
    known = [rollout.scores for rollout in rollouts if rollout.scores is not None]
    return known if len(known) == len(rollouts) else reward(prompts, rollouts)


def collect(
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    reward: Reward,
    *,
    samples_per_prompt: int,
) -> Samples[Ragged]:
    """Lays the rows out as given: one a rollout, siblings side by side; scores what has not been.

    Rows are views of RolloutArrays. Raises ValueError for a rollout of several trajectories.
    """
    own = list(rollouts)
    for rollout in own:
        if len(rollout.trajectories) != 1:
            raise ValueError(
                f"A rollout has {len(rollout.trajectories)} trajectories. One is learnt from: have the environment return one."
            )
    scores = scores_of(prompts, own, reward)
    parts = list(dict.fromkeys(name for score in scores for name in score if name != "reward"))
    arrays = RolloutArrays.of(rollouts)
    tokens = arrays.column("token_ids")
    reward_parts = {}
    for name in parts:
        numbers = [score.get(name, torch.nan) for score in scores]
        reward_parts[name] = torch.tensor(numbers, dtype=torch.float32)
    return Samples(
        prompts=list(prompts),
        rows=Rows(
            tokens,
            torch.tensor([rollout.trajectories[0].prompt_length for rollout in own]),
            tokens.lengths,
            # place t speaks about token t + 1
            arrays.column("loss_mask").shifted(1),
            RowPictures.of(prompt.pictures for prompt in prompts),
        ),
        behaviour_logp=arrays.column("logprobs").shifted(1),
        reward=torch.tensor([score["reward"] for score in scores], dtype=torch.float32),
        group=torch.arange(len(own)) // samples_per_prompt,
        truncated=torch.tensor([rollout.truncated for rollout in own]),
        reward_parts=reward_parts,
        versions=arrays.column("versions").shifted(1),
    )
