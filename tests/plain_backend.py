"""A second backend, for tests: a plain torch module of `transformers` on one process."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rftmega.checkpoints.training_files import StoredModel
from rftmega.config import RunConfig
from rftmega.core.shards import LogicalTensor, Shard, ShardBox, ShardPart, whole
from rftmega.core.types import LossFn, Metrics, Rows, TokenStats
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.runtime.device.residency import PARTS, Residency

MOMENTS = ("exp_avg", "exp_avg_sq")


class PlainPolicy:
    """PlainPolicy is a whole model in float32, stepped by torch's own AdamW."""

    dtype, layout, label = torch.float32, "one process", "rank 0"
    classifier, replica_group, push_to_rollout = False, None, None
    sum_of_frozen = None

    def __init__(self, config: RunConfig):
        self.path, self.temperature = config.model.path, config.rollout.temperature
        self.description = describe(read_hf_config(self.path))
        self.reference = AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype)
        # built anew: memory that is mapped from a file can't be offloaded
        self.module = AutoModelForCausalLM.from_config(self.reference.config, dtype=self.dtype)
        self.module.load_state_dict(self.reference.state_dict())
        self.named = dict(self.module.named_parameters())
        chosen = config.optimizer
        groups = [  # norms are exempt from weight decay
            {"params": [x], "weight_decay": chosen.weight_decay if x.dim() > 1 else 0.0}
            for x in self.named.values()
        ]
        betas, self.rate = (chosen.beta1, chosen.beta2), chosen.learning_rate
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=betas, eps=chosen.epsilon)
        self.clip = chosen.clip_grad or float("inf")
        self.residency, self.steps = Residency(self._parts), 0

    def _parts(self) -> dict[str, list[Tensor]]:
        moments = [state[name] for state in self.optimizer.state.values() for name in MOMENTS]
        return dict(zip(PARTS, [list(self.named.values()), [], [], moments], strict=True))

    def averaged(self) -> None: ...

    def adapters(self) -> None: ...

    def _stats(self, module: Any, rows: Rows, temperature: float | None = None) -> TokenStats:
        logits = module(rows.tokens[:, :-1]).logits / (temperature or self.temperature)
        logp = logits.log_softmax(-1)
        chosen = logp.gather(-1, rows.tokens[:, 1:, None])[..., 0]
        return TokenStats(chosen, -(logp.exp() * logp).sum(-1))

    @torch.no_grad()
    def log_probs(self, rows: Any, *, temperature: float | None = None) -> Any:
        return rows.like(self._stats(self.module, rows.padded(), temperature))

    @torch.no_grad()
    def reference_log_probs(self, rows: Any) -> Any:
        return rows.like(self._stats(self.reference, rows.padded()))

    def step(self, experience: Any, loss_fn: LossFn, **others: Any) -> Metrics:
        experience = experience.padded()
        assert others["auxiliary"] is others["scored"] is None
        loss = loss_fn(self._stats(self.module, experience.rows), experience)
        self.optimizer.zero_grad()
        mean = (loss.value * loss.weight).sum() / loss.count
        mean.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.named.values(), self.clip)
        self.optimizer.step()
        self.residency.changed()
        self.steps += 1
        found = {"loss": float(mean), "count": float(loss.count), "grad_norm": float(norm)}
        for name, metric in loss.metrics.items():
            found[name] = float((metric.value * metric.weight).sum() / metric.count)
        return found | {"learning_rate": self.rate, "optimizer_steps": 1.0, "skipped_steps": 0.0}

    def shards(self) -> list[Shard]:
        found = []
        for number, (name, tensor) in enumerate(self.named.items()):
            logical = LogicalTensor((name,), (tuple(tensor.shape),), self.dtype, layer=number)
            parts = (ShardPart(0, whole(tensor.shape), (0,) * tensor.dim()),)
            found.append(Shard(logical, parts, tensor))
        return found

    def training_tensors(self) -> Iterator[ShardBox]:
        for name, tensor in self.named.items():
            state = self.optimizer.state.get(tensor, {})
            kinds = {"weights": tensor.detach()} | {kind: state[kind] for kind in MOMENTS if state}
            for kind, held in kinds.items():
                shape, host = tuple(held.shape), self.residency.host(held)
                yield ShardBox(f"{kind}/{name}", shape, False, (0,) * held.dim(), host, True)

    def described(self) -> dict[str, Any]:
        said = {"hf_config": read_hf_config(self.path), "path": self.path}
        return said | {"dtype": str(self.dtype), "layout": {}}

    def counters(self) -> dict[str, int]:
        return {"adam_steps": self.steps, "schedule_steps": self.steps}

    def restore(self, stored: StoredModel, **_: bool) -> None:
        self.steps = stored.said["adam_steps"]
        for tensor in self.named.values() if self.steps else ():
            moments = {kind: torch.zeros(tensor.shape) for kind in MOMENTS}
            self.optimizer.state[tensor] = {"step": torch.tensor(float(self.steps))} | moments
        stored.fill(self.training_tensors())
        self.residency.changed()

    def random_state(self) -> dict[str, Any]:
        return {}

    def set_random_state(self, state: dict[str, Any]) -> None: ...


class PlainBackend:
    """PlainBackend builds policies; it has no value models."""

    policy = staticmethod(PlainPolicy)
