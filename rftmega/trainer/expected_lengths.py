"""Expected lengths of answers: what takes longest is begun first."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rftmega.core.types import Prompt, Rollout

REMEMBERED = 2**18  # prompts: 4 MiB of a checkpoint


class ExpectedLengths:
    """ExpectedLengths estimates how many tokens the answers to a prompt have."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        """`limit`: prompts that are remembered, the latest."""
        self.limit = limit
        # of a prompt: mean of its latest answers; who was asked last is last
        self._completions: dict[int, float] = {}
        # of all prompts and answers so far, each prompt counted with each of its answers
        self._tokens = [0, 0]

    def expected(self, prompts: Sequence[Prompt]) -> list[float]:
        """Returns the mean length of each prompt's latest answers; a new one's own length, scaled
        by answer over prompt.
        """
        asked, answered = self._tokens
        scale = answered / asked if asked else 1.0
        known: dict[tuple[int, ...], float] = {}
        for prompt in prompts:
            if prompt.token_ids not in known:
                known[prompt.token_ids] = self._completions.get(
                    _key(prompt), len(prompt.token_ids) * scale
                )
        return [known[prompt.token_ids] for prompt in prompts]

    def learn(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout | None]) -> None:
        """Remembers the answers; a prompt of which one was broken off (None) stays as it was: its
        short ones alone mislead.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        broken = {
            prompt.token_ids
            for prompt, completion in zip(prompts, rollouts, strict=True)
            if completion is None
        }
        for prompt, completion in zip(prompts, rollouts, strict=True):
            if completion is not None and not completion.lost and prompt.token_ids not in broken:
                found.setdefault(prompt.token_ids, []).append(completion.chosen_tokens)
        for ids, lengths in found.items():
            key = _key(Prompt(ids))
            self._completions.pop(key, None)
            self._completions[key] = sum(lengths) / len(lengths)
            self._tokens[0] += len(ids) * len(lengths)
            self._tokens[1] += sum(lengths)
        for key in list(
            itertools.islice(self._completions, max(0, len(self._completions) - self.limit))
        ):
            del self._completions[key]

    def state(self) -> dict[str, Any]:
        """Returns all that a resume needs to send the same requests in the same order: 16 bytes a
        prompt.
        """
        prompts = torch.tensor(list(self._completions), dtype=torch.int64)
        means = torch.tensor(list(self._completions.values()), dtype=torch.float64)
        return {"prompts": prompts, "means": means, "tokens": list(self._tokens)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if "answers" in state:  # of a checkpoint of format 2
            self._completions = {
                _number(bytes.fromhex(key)): mean for key, mean in state["answers"].items()
            }
        else:
            self._completions = dict(
                zip(state["prompts"].tolist(), state["means"].tolist(), strict=True)
            )
        self._tokens = list(state["tokens"])


def _key(prompt: Prompt) -> int:
    """Hashes a prompt to eight bytes."""
    return _number(
        hashlib.blake2b(",".join(map(str, prompt.token_ids)).encode(), digest_size=8).digest()
    )


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, signed=True)
