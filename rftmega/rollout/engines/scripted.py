"""Engine without a model, for tests of the trainer: random completions that depend only on seeds,
equal on every process and parallel layout.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from rftmega.config import RolloutConfig
from rftmega.core.types import Completion, Sampling
from rftmega.rollout.engines.base import Engine
from rftmega.rollout.requests import Request, Requests
from rftmega.rollout.requests.partial_completion import PartialCompletion


def _first(completion: Completion, tokens: int) -> PartialCompletion:
    """Returns the first `tokens` tokens of a completion, with log-probs, as a PartialCompletion."""
    whole = PartialCompletion.of(completion)
    return PartialCompletion(
        whole.token_ids[:tokens], whole.logprobs[:tokens], whole.of_tokens[:tokens]
    )


class ScriptedEngine(Engine):
    """ScriptedEngine generates random token ids, lengths and log-probs that depend only on the seed
    of a request. It reads every pushed tensor and stores none.

    Each step adds one token to each running completion, at most rollout.max_batch at a time; they
    start in the order of the requests. `steps` counts the steps so far.
    """

    def __init__(self, config: RolloutConfig, *, vocabulary: int, stop_ids: Sequence[int]):
        super().__init__()
        self.longest, self.slots = config.max_response_tokens, config.max_batch
        self.row_tokens = config.max_row_tokens
        self.steps = 0
        self.vocabulary = vocabulary
        self.stop_ids = stop_ids

    def _serve(self, requests: Requests, sampling: Sampling) -> None:
        completions: list[Completion] = []
        waiting, running = deque[int](), 0
        due: dict[int, list[int]] = defaultdict(
            list
        )  # step -> completions whose last token it generates
        begun_at: dict[int, int] = {}  # completion -> step before its first token
        while True:
            if (room := self.slots - running - len(waiting)) > 0:
                begun = len(completions)
                completions += [self._cut(request) for request in requests.take(room)]
                waiting.extend(range(begun, len(completions)))
            if not waiting and not running:
                break
            while waiting and running < self.slots:
                number, running = waiting.popleft(), running + 1
                due[self.steps + len(completions[number].token_ids)].append(number)
                begun_at[number] = self.steps
            self.steps += 1
            if done := due.pop(self.steps, []):
                running -= len(done)
                requests.finished(done, [completions[number] for number in done])
            if requests.stopped():
                if requests.wants_parts:
                    left = [number for numbers in due.values() for number in numbers]
                    requests.broken_off(
                        {n: _first(completions[n], self.steps - begun_at[n]) for n in left}
                    )
                break

    def _cut(self, request: Request) -> Completion:
        """Returns the random completion for a request's seed, truncated to the request's token
        limit.
        """
        whole = self._completion(request.seed)
        most = request.limit(self.longest)
        if most >= len(whole.token_ids):
            return whole
        return Completion(
            whole.token_ids[:most], whole.logprobs[:most], "length", self.version or 0
        )

    def _completion(self, seed: int) -> Completion:
        rng = torch.Generator().manual_seed(seed)
        length = int(torch.randint(1, self.longest + 1, (), generator=rng))
        ids = torch.randint(0, self.vocabulary, (length,), generator=rng).tolist()
        logprobs = (-torch.rand(length, generator=rng)).tolist()
        if length < self.longest:
            ids[-1] = self.stop_ids[0]
        assert self.version is not None
        reason: Literal["stop", "length"] = "stop" if ids[-1] in self.stop_ids else "length"
        return Completion(ids, logprobs, reason, self.version)

    def _load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in named_tensors:
            torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def _sleep(self) -> None: ...

    def _wake(self, parts: Sequence[str]) -> None: ...
