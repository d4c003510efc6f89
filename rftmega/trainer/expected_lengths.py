"""Expected lengths of completions, so that requests with the longest expected completions start
first.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rftmega.core.types import Prompt, Rollout

REMEMBERED = 2**18  # prompts: 4 MiB of a checkpoint


class ExpectedLengths:
    """ExpectedLengths estimates the number of completion tokens for a prompt."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        """`limit`: maximum number of prompts whose lengths are remembered; the least recently
        updated prompts are dropped.
        """
        self.limit = limit
        # prompt hash -> mean length of its latest completions; the most recently updated prompt is
        # last
        self._completions: dict[int, float] = {}
        # totals over all completions so far: prompt tokens (counted once per completion),
        # completion tokens
        self._tokens = [0, 0]

    def expected(self, prompts: Sequence[Prompt]) -> list[float]:
        """Returns the expected completion tokens of each prompt: the mean length of its latest
        completions; for a new prompt its number of tokens times the overall ratio of completion to
        prompt tokens.
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
        """Records the lengths of completions; `rollouts`: one for each of `prompts`. Skips a prompt
        that has an aborted completion (None), since its finished completions are biased towards
        short ones.
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
        """Returns the state from which a resumed run sends the same requests in the same order; it
        has 16 bytes per prompt.
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
    """Returns an eight-byte hash of a prompt as an integer."""
    return _number(
        hashlib.blake2b(",".join(map(str, prompt.token_ids)).encode(), digest_size=8).digest()
    )


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, signed=True)
