"""Which requests an engine begins with: those whose answers will be long, so that no long one is left over at the end."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rftmega.types import Completion, Prompt

REMEMBERED = 2**18  # prompts: 4 MiB of a checkpoint
PIECES = 4  # an engine gets at least so many where there are enough requests: fewer could not be balanced


class Lengths:
    """How many tokens the answers to a prompt are expected to have."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        """`limit`: prompts that are remembered, the latest."""
        self.limit = limit
        self._answers: dict[int, float] = {}  # of a prompt: mean of its latest answers; who was asked last is last
        self._tokens = [0, 0]  # of all prompts and answers so far, each prompt counted with each of its answers

    def expected(self, prompts: Sequence[Prompt]) -> list[float]:
        """What the prompt's latest answers had; of a new prompt its own length, in the proportion of all answers so far."""
        asked, answered = self._tokens
        scale = answered / asked if asked else 1.0
        known: dict[tuple[int, ...], float] = {}
        for prompt in prompts:
            if prompt.token_ids not in known:
                known[prompt.token_ids] = self._answers.get(_key(prompt), len(prompt.token_ids) * scale)
        return [known[prompt.token_ids] for prompt in prompts]

    def learn(self, prompts: Sequence[Prompt], completions: Sequence[Completion | None]) -> None:
        """Remembers the answers; a prompt of which one was broken off (None) stays as it was: its short ones alone mislead."""
        found: dict[tuple[int, ...], list[int]] = {}
        broken = {prompt.token_ids for prompt, answer in zip(prompts, completions, strict=True) if answer is None}
        for prompt, answer in zip(prompts, completions, strict=True):
            if answer is not None and prompt.token_ids not in broken:
                found.setdefault(prompt.token_ids, []).append(len(answer.token_ids))
        for ids, lengths in found.items():
            key = _key(Prompt(ids))
            self._answers.pop(key, None)
            self._answers[key] = sum(lengths) / len(lengths)
            self._tokens[0] += len(ids) * len(lengths)
            self._tokens[1] += sum(lengths)
        for key in list(itertools.islice(self._answers, max(0, len(self._answers) - self.limit))):
            del self._answers[key]

    def state(self) -> dict[str, Any]:
        """All that a resume needs to send the same requests in the same order: 16 bytes a prompt."""
        prompts = torch.tensor(list(self._answers), dtype=torch.int64)
        means = torch.tensor(list(self._answers.values()), dtype=torch.float64)
        return {"prompts": prompts, "means": means, "tokens": list(self._tokens)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if "answers" in state:  # of a checkpoint of format 2
            self._answers = {_number(bytes.fromhex(key)): mean for key, mean in state["answers"].items()}
        else:
            self._answers = dict(zip(state["prompts"].tolist(), state["means"].tolist(), strict=True))
        self._tokens = list(state["tokens"])


def shares(prompts: Sequence[Prompt], expected: Sequence[float], engines: int) -> list[list[int]]:
    """Places among `prompts` that each engine gets, in the order in which it should begin them: longest expected first.

    Whoever has least gets the next (Graham, Bounds on multiprocessing timing anomalies, 1969). Neighbours with the same prompt
    stay together as far as there is enough to balance, so that they share the prompt's cache.
    """
    largest = max(1, len(prompts) // (PIECES * engines))
    pieces: list[list[int]] = []
    for _, run in itertools.groupby(range(len(prompts)), key=lambda place: prompts[place].token_ids):
        siblings = list(run)
        pieces += [siblings[begin : begin + largest] for begin in range(0, len(siblings), largest)]
    pieces.sort(key=lambda piece: -expected[piece[0]])  # stable: of equals the first
    found: list[list[int]] = [[] for _ in range(engines)]
    loads = [0.0] * engines
    for piece in pieces:
        least = loads.index(min(loads))
        found[least] += piece
        loads[least] += sum(expected[place] for place in piece)
    return found


def _key(prompt: Prompt) -> int:
    """A prompt in eight bytes."""
    return _number(hashlib.blake2b(",".join(map(str, prompt.token_ids)).encode(), digest_size=8).digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, signed=True)
