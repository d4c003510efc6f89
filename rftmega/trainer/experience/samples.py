"""Conversion of the rollouts of one step into rows of Samples."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rftmega.core.errors import InfrastructureFault
from rftmega.core.interfaces import Reward
from rftmega.core.media_positions import RowImages
from rftmega.core.ragged import Ragged
from rftmega.core.rollout_arrays import ROUTES, selected
from rftmega.core.types import Prompt, Rollout, Rows, Samples


def complete(rollouts: Sequence[Rollout | None]) -> Sequence[Rollout]:
    """Returns `rollouts` unchanged; raises AssertionError if one is missing (None)."""
    assert None not in rollouts, "the engine left rollouts out"
    return rollouts  # type: ignore[return-value]


def scores_of(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], reward: Reward
) -> list[dict[str, float]]:
    """Returns one dict of reward components per rollout: the scores stored in the rollouts or, if
    any rollout has none, the result of `reward` for all rollouts.
    """
    known = [rollout.scores for rollout in rollouts if rollout.scores is not None]
    return known if len(known) == len(rollouts) else reward(prompts, rollouts)


def kept_of(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
) -> tuple[list[int], list[Prompt], list[Rollout]]:
    """Returns indices, prompts and rollouts of the rollouts that were not lost.

    Raises InfrastructureFault if all rollouts were lost.
    """
    kept = [place for place, rollout in enumerate(rollouts) if not rollout.lost]
    if not kept:
        raise InfrastructureFault(
            f"All {len(rollouts)} rollouts were lost, so nothing can be learnt from them; the first: {rollouts[0].lost}"
        )
    return kept, [prompts[place] for place in kept], [rollouts[place] for place in kept]


def collect(
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    reward: Reward,
    *,
    samples_per_prompt: int,
) -> Samples[Ragged]:
    """Returns the rollouts as Samples in the given order: one row per trajectory, with the rows of
    a rollout and of its group adjacent. Rollouts without scores are scored by `reward`.

    `rollouts` has `samples_per_prompt` consecutive entries per prompt. Rows are views of
    RolloutArrays. Lost rollouts get no rows. Raises InfrastructureFault if all rollouts were lost.
    """
    places, asked, own = kept_of(prompts, rollouts)
    scores = scores_of(asked, own, reward)
    arrays = selected(rollouts, places)
    tokens = arrays.column("token_ids")
    trajectories = [each for rollout in own for each in rollout.trajectories]
    sizes = torch.tensor([len(rollout.trajectories) for rollout in own])
    rollout_of = torch.tensor(places).repeat_interleave(sizes)
    prompt_of = [prompts[place] for place in rollout_of.tolist()]

    def columns(dicts: Sequence[dict[str, float]]) -> dict[str, Tensor]:
        names = dict.fromkeys(name for each in dicts for name in each if name != "reward")
        return {
            name: _spread([each.get(name, torch.nan) for each in dicts], sizes) for name in names
        }

    return Samples(
        prompts=prompt_of,
        rows=Rows(
            tokens,
            torch.tensor([each.prompt_length for each in trajectories]),
            tokens.lengths,
            # position t refers to token t + 1
            arrays.column("loss_mask").shifted(1),
            RowImages.of(prompt.images for prompt in prompt_of),
            arrays.column(ROUTES).shortened() if ROUTES in arrays.columns else None,
        ),
        behaviour_logp=arrays.column("logprobs").shifted(1),
        reward=_spread([score["reward"] for score in scores], sizes),
        group=rollout_of // samples_per_prompt,
        truncated=_spread([rollout.truncated for rollout in own], sizes) > 0,
        reward_parts=columns(scores),
        versions=arrays.column("versions").shifted(1),
        rollout=rollout_of,
        turns=[each.turns for each in trajectories],
        measures=columns([rollout.measures for rollout in own]),
    )


def _spread(of_rollouts: Sequence[float], sizes: Tensor) -> Tensor:
    """Returns [B] float32: for each row the value of its rollout. `sizes`: rows of each rollout."""
    return torch.tensor(of_rollouts, dtype=torch.float32).repeat_interleave(sizes)
