"""Tokens go to given experts, and the trainer tells which its routers chose, in every layout.

The oracle is transformers, one row at a time, whose routers are made to take the same experts.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core import expert_routes
from rftmega.core.types import Experience, Rows, TokenLoss
from tests.layouts import build_actor, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

ROWS = [[(37 * i + 11 * b) % 131 for i in range(length)] for b, length in enumerate((9, 2, 14, 7))]
LAYERS, EXPERTS, ACTIVE = 3, 4, 2  # with experts
UNKNOWN = expert_routes.unknown(torch.uint8)
TEMPERATURE = 0.8
LAYOUTS = [
    pytest.param(1, {}, id="one process"),
    pytest.param(
        2, {"tensor": 2, "sequence": True, "expert": 2, "recompute": "full"}, id="TP2, SP, EP2, full"
    ),
    pytest.param(
        2,
        {"pipeline": 2, "virtual_pipeline": 2, "recompute": "full"},
        id="PP2 x VPP2, full",
        marks=pytest.mark.ranks,
    ),
    pytest.param(2, {"context": 2}, id="CP2", marks=pytest.mark.ranks),
    pytest.param(
        4,
        {"tensor": 2, "sequence": True, "pipeline": 2},
        id="TP2 x PP2, SP",
        marks=pytest.mark.ranks,
    ),
    pytest.param(4, {"context": 2, "expert": 2, "pipeline": 2}, id="CP2 x PP2 x EP2", marks=pytest.mark.ranks),
]  # fmt: skip


def given_routes() -> Tensor:
    """Routes [B, T - 1, layers, experts a token], unknown in every fifth place."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(len(ROWS), 13, LAYERS, EXPERTS, generator=generator)
    routes = scores.argsort(-1)[..., :ACTIVE].to(torch.uint8)
    routes[:, ::5] = UNKNOWN
    return routes


def loss_of(stats: Any, experience: Experience) -> TokenLoss:
    """The negative log-prob, a mean over tokens."""
    return TokenLoss(-stats.logp, experience.mask.float(), experience.mask.sum(), {})


def body(world: Any, folder: Path, parallel: ParallelConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rows = rows_of(ROWS, [1] * len(ROWS))
    given = replace(rows, routes=given_routes())
    actor = build_actor(
        folder,
        parallel,
        OptimizerConfig(learning_rate=0.0, weight_decay=0.0, clip_grad=0.0),
        temperature=TEMPERATURE,
        token_cap=16,
        router_replay="trainer",
        keep_reference=True,
    )
    own = actor.log_probs(rows.ragged())
    found["own"], found["chosen"] = own.logp.padded(), own.routes.padded(fill=UNKNOWN)
    found["told again"] = actor.log_probs(given.ragged()).routes
    found["given"] = actor.log_probs(given.ragged()).logp.padded()
    found["reference"] = actor.reference_log_probs(given.ragged()).logp.padded()
    for name, routes in (("given", given.routes), ("own", None)):
        experience = experience_of(rows, routes)
        metrics = actor.step(experience.ragged(), loss_of)
        found[f"{name} loss"], found[f"{name} norm"] = metrics["loss"], metrics["grad_norm"]
    return found


def experience_of(rows: Rows, routes: Tensor | None) -> Experience:
    nothing = torch.zeros(rows.mask.shape)
    return Experience(
        tokens=rows.tokens,
        prompt_lengths=rows.prompt_lengths,
        lengths=rows.lengths,
        mask=rows.mask,
        behaviour_logp=nothing,
        old_logp=nothing,
        reference_logp=None,
        advantage=nothing,
        routes=routes,
    )


class Oracle:
    """transformers, whose routers take the experts that they are told to."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager"
        )
        self.told: Tensor | None = None  # [tokens, layers, experts a token]
        self.routes = torch.empty(0)  # that were taken, [B, T - 1, layers, experts a token]
        self.chosen: list[Tensor] = []
        routers = [m for m in self.model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]
        for place, router in enumerate(routers):
            router.register_forward_hook(self._hook(place))

    def _hook(self, place: int) -> Any:
        def replaced(router: Any, given: Any, told: Any) -> Any:
            logits, weights, experts = told
            if self.told is not None:
                wanted = self.told[:, place].long()
                experts = torch.where(wanted == UNKNOWN, experts, wanted)
                weights = logits.softmax(-1).gather(-1, experts)
                weights = weights / weights.sum(-1, keepdim=True)
            self.chosen.append(experts.sort(-1).values)
            return logits, weights, experts

        return replaced

    def log_probs(self, routes: Tensor | None) -> Tensor:
        """[B, T - 1], with a gradient."""
        self.routes = torch.full((len(ROWS), 13, LAYERS, ACTIVE), UNKNOWN, dtype=torch.int64)
        parts = []
        for number, ids in enumerate(ROWS):
            fed = len(ids) - 1
            self.told = None if routes is None else routes[number, :fed]
            self.chosen.clear()
            logits = self.model(torch.tensor([ids[:-1]])).logits[0] / TEMPERATURE
            self.routes[number, :fed] = torch.stack(self.chosen, 1)
            own = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
            parts.append(torch.nn.functional.pad(own, (0, 13 - fed)))
        return torch.stack(parts)

    def loss_and_norm(self, routes: Tensor | None) -> tuple[float, float]:
        mask = rows_of(ROWS, [1] * len(ROWS)).mask
        loss = -(self.log_probs(routes) * mask).sum() / mask.sum()
        self.model.zero_grad()
        loss.backward()
        squares = [p.grad.square().sum() for p in self.model.parameters() if p.grad is not None]
        return loss.item(), torch.stack(squares).sum().sqrt().item()


@pytest.mark.parametrize(("size", "parallel"), LAYOUTS)
def test_tokens_go_to_the_given_experts_and_others_where_the_router_sends_them(
    size: int, parallel: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3-moe")
    oracle, routes = Oracle(folder), given_routes()
    with torch.no_grad():
        given = oracle.log_probs(routes)
        own = oracle.log_probs(None)
    chosen = oracle.routes
    assert (given - own).abs().max() > 1e-3, "the given experts are others"
    for seen in run_ranks(size, body, folder, ParallelConfig(**parallel)):
        assert torch.allclose(seen["given"], given, atol=1e-5)
        assert torch.allclose(seen["own"], own, atol=1e-5)
        assert torch.allclose(seen["reference"], own, atol=1e-5), "it chooses its own experts"
        assert torch.equal(seen["chosen"].long().sort(-1).values, chosen)
        assert seen["told again"] is None, "who is told need not tell"
        for name, told in (("given", routes), ("own", None)):
            loss, norm = oracle.loss_and_norm(told)
            assert seen[f"{name} loss"] == pytest.approx(loss, rel=1e-5)
            assert seen[f"{name} norm"] == pytest.approx(norm, rel=1e-4)
