"""The oracle: one row at a time, one token at a time, through `transformers`. Slow and obvious."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rftmega.config import RolloutConfig
from rftmega.errors import WeightMismatch
from rftmega.rollout.base import Engine, Finished, Stop
from rftmega.types import Completion, Prompt


class TransformersEngine(Engine):
    """A plain module in float32; what the fast engine is tested against."""

    def __init__(self, folder: str | Path, config: RolloutConfig, *, stop_ids: Sequence[int], where: torch.device):
        super().__init__()
        self.longest = config.max_response_tokens
        self.stop_ids = stop_ids
        self.where = where
        config_of = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config_of, dtype=torch.float32, trust_remote_code=False)
        self.model = model.eval().to(where)

    @torch.no_grad()
    def _generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], temperature: float, finished: Finished, stop: Stop
    ) -> list[Completion | None]:
        answers: list[Completion | None] = [None] * len(prompts)
        for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            answers[place] = answer = self._answer(prompt, seed, temperature)
            finished([place], [answer])
            if stop():
                break
        return answers

    def _answer(self, prompt: Prompt, seed: int, temperature: float) -> Completion:
        rng = torch.Generator(self.where).manual_seed(seed)
        ids: list[int] = []
        logprobs: list[float] = []
        feed = torch.tensor([prompt.token_ids], device=self.where)
        cache = None
        while len(ids) < self.longest and (not ids or ids[-1] not in self.stop_ids):
            out = self.model(feed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logp = (out.logits[0, -1].float() / (temperature or 1.0)).log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1, generator=rng)) if temperature else int(logp.argmax())
            ids.append(token)
            logprobs.append(float(logp[token]))
            feed = torch.tensor([[token]], device=self.where)
        assert self.version is not None
        return Completion(tuple(ids), tuple(logprobs), "stop" if ids[-1] in self.stop_ids else "length", self.version)

    @torch.no_grad()
    def _load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raises WeightMismatch where a tensor is unknown, of another shape, or missing."""
        own = dict(self.model.named_parameters())  # a tied head is listed once, under the embedding's name
        for name, tensor in named_tensors:
            if name not in own or own[name].shape != tensor.shape:
                raise WeightMismatch(f"The engine has no {name} of shape {tuple(tensor.shape)}, or got it twice.")
            own.pop(name).copy_(tensor)
        if own:
            raise WeightMismatch(f"The push ended without {sorted(own)}.")

    def _sleep(self) -> None:
        self.model.to("cpu")

    def _wake(self, parts: Sequence[str]) -> None:
        self.model.to(self.where)
