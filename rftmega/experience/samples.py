"""Completions of one rollout, laid out as rows."""

from collections.abc import Sequence

import torch

from rftmega.interfaces import Reward
from rftmega.types import Completion, Prompt, Rows, Samples


def seeds_of(seed: int, step: int, requests: int, *, rollout: int = 0) -> list[int]:
    """Returns one seed a request, below 2^31: others in another step, in another `rollout` of the
    step, and in a run with another seed.
    """
    first = (seed * 1_000_003 + step) * requests + rollout * 1_640_531_527
    return [(first + i) % 2**31 for i in range(requests)]


def scores_of(
    prompts: Sequence[Prompt], completions: Sequence[Completion], reward: Reward
) -> list[dict[str, float]]:
    """Returns the scores that completions carry; where one carries none, asks the reward for all of
    them.
    """
    known = [completion.scores for completion in completions if completion.scores is not None]
    return known if len(known) == len(completions) else reward(prompts, completions)


def collect(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    reward: Reward,
    *,
    samples_per_prompt: int,
) -> Samples:
    """Lays the rows out as given: one a completion, siblings side by side; scores what has not
    been.
    """
    pairs = list(zip(prompts, completions, strict=True))
    scores = scores_of(prompts, completions, reward)
    parts = list(dict.fromkeys(name for score in scores for name in score if name != "reward"))
    width = max(len(prompt.token_ids) + len(completion.token_ids) for prompt, completion in pairs)
    tokens = torch.zeros(len(pairs), width, dtype=torch.int64)
    behaviour_logp = torch.zeros(len(pairs), width - 1)
    versions = torch.full((len(pairs), width - 1), -1)
    for row, (prompt, completion) in enumerate(pairs):
        ids = prompt.token_ids + completion.token_ids
        tokens[row, : len(ids)] = torch.tensor(ids)
        targets = slice(len(prompt.token_ids) - 1, len(ids) - 1)
        behaviour_logp[row, targets] = torch.tensor(completion.logprobs)
        versions[row, targets] = torch.tensor(completion.versions or completion.policy_version)
    prompt_lengths = torch.tensor([len(prompt.token_ids) for prompt, _ in pairs])
    response_lengths = torch.tensor([len(completion.token_ids) for _, completion in pairs])
    return Samples(
        prompts=list(prompts),
        rows=Rows(tokens, prompt_lengths, prompt_lengths + response_lengths),
        behaviour_logp=behaviour_logp,
        reward=torch.tensor([score["reward"] for score in scores], dtype=torch.float32),
        group=torch.arange(len(pairs)) // samples_per_prompt,
        truncated=torch.tensor([completion.finish_reason == "length" for _, completion in pairs]),
        reward_parts={
            name: torch.tensor(
                [score.get(name, torch.nan) for score in scores], dtype=torch.float32
            )
            for name in parts
        },
        versions=versions,
    )
