"""Completions of one rollout, laid out as rows."""

from collections.abc import Sequence

import torch

from rftmega.interfaces import Reward
from rftmega.types import Completion, Prompt, Rows, Samples


def collect(prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], reward: Reward) -> Samples:
    """Scores every completion and lays the rows out, prompt-major: row = prompt * samples_per_prompt + sample."""
    pairs = [(g, p, c) for g, (p, answers) in enumerate(zip(prompts, completions, strict=True)) for c in answers]
    scores = [reward(prompt, completion) for _, prompt, completion in pairs]
    width = max(len(prompt.token_ids) + len(completion.token_ids) for _, prompt, completion in pairs)
    tokens = torch.zeros(len(pairs), width, dtype=torch.int64)
    behaviour_logp = torch.zeros(len(pairs), width - 1)
    for row, (_, prompt, completion) in enumerate(pairs):
        ids = prompt.token_ids + completion.token_ids
        tokens[row, : len(ids)] = torch.tensor(ids)
        behaviour_logp[row, len(prompt.token_ids) - 1 : len(ids) - 1] = torch.tensor(completion.logprobs)
    prompt_lengths = torch.tensor([len(prompt.token_ids) for _, prompt, _ in pairs])
    response_lengths = torch.tensor([len(completion.token_ids) for _, _, completion in pairs])
    return Samples(
        rows=Rows(tokens, prompt_lengths, prompt_lengths + response_lengths),
        behaviour_logp=behaviour_logp,
        reward=torch.tensor([score["reward"] for score in scores]),
        group=torch.tensor([group for group, _, _ in pairs]),
        truncated=torch.tensor([completion.finish_reason == "length" for _, _, completion in pairs]),
        reward_parts={k: torch.tensor([s[k] for s in scores]) for k in scores[0] if k != "reward"},
    )
