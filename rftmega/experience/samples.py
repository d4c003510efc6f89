"""Rollouts of one step, laid out as rows."""

from collections.abc import Sequence

import torch

from rftmega.interfaces import Reward
from rftmega.types import Prompt, Rollout, Rows, Samples, Trajectory


def complete(rollouts: Sequence[Rollout | None]) -> list[Rollout]:
    """Returns the rollouts of an engine that was to finish all of them."""
    found = [rollout for rollout in rollouts if rollout is not None]
    assert len(found) == len(rollouts), "the engine left rollouts out"
    return found


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
) -> Samples:
    """Lays the rows out as given: one a rollout, siblings side by side; scores what has not been.

    Raises ValueError for a rollout of several trajectories.
    """
    scores = scores_of(prompts, rollouts, reward)
    parts = list(dict.fromkeys(name for score in scores for name in score if name != "reward"))
    trajectories = [_only(rollout) for rollout in rollouts]
    width = max(map(len, trajectories))
    tokens = torch.zeros(len(trajectories), width, dtype=torch.int64)
    mask = torch.zeros(len(trajectories), width - 1, dtype=torch.bool)
    behaviour_logp = torch.zeros(len(trajectories), width - 1)
    versions = torch.full((len(trajectories), width - 1), -1)
    for row, own in enumerate(trajectories):
        end = len(own)
        tokens[row, :end] = torch.from_numpy(own.token_ids)
        # column t speaks about token t + 1
        mask[row, : end - 1] = torch.from_numpy(own.loss_mask[1:])
        behaviour_logp[row, : end - 1] = torch.from_numpy(own.logprobs[1:])
        versions[row, : end - 1] = torch.from_numpy(own.versions[1:])
    return Samples(
        prompts=list(prompts),
        rows=Rows(
            tokens,
            torch.tensor([own.prompt_length for own in trajectories]),
            torch.tensor([len(own) for own in trajectories]),
            mask,
        ),
        behaviour_logp=behaviour_logp,
        reward=torch.tensor([score["reward"] for score in scores], dtype=torch.float32),
        group=torch.arange(len(rollouts)) // samples_per_prompt,
        truncated=torch.tensor([own.truncated for own in trajectories]),
        reward_parts={
            name: torch.tensor(
                [score.get(name, torch.nan) for score in scores], dtype=torch.float32
            )
            for name in parts
        },
        versions=versions,
    )


def _only(rollout: Rollout) -> Trajectory:
    if len(rollout.trajectories) != 1:
        raise ValueError(
            f"A rollout has {len(rollout.trajectories)} trajectories. One is learnt from: have the environment return one."
        )
    return rollout.trajectories[0]
