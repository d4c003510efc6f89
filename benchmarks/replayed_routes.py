"""Measures the log-prob mismatch between vLLM and the trainer in bfloat16, with the trainer's own
expert routes and with the engine's.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.backends.megatron import MegatronActor
from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core import expert_routes
from rftmega.core.expert_routes import RoutedModel
from rftmega.core.types import Prompt, Sampling
from tests.layouts import build_actor, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

LAYERS, EXPERTS, ACTIVE = 6, 16, 4
COMPLETIONS, TOKENS = 64, 40
SHAPE: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": ACTIVE,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [],
}


def gap_body(world: Any, folder: Path, dtype: str) -> dict[str, float]:
    from rftmega.rollout.engines.vllm import VLLMEngine

    actor = build_actor(
        folder, ParallelConfig(), dtype=dtype, token_cap=4096, router_replay="trainer"
    )
    config = RolloutConfig(
        max_prompt_tokens=32, max_response_tokens=TOKENS, cpu_cache_gib=0.1, max_batch=16
    )
    routed = RoutedModel(tuple(range(LAYERS)), EXPERTS, ACTIVE)
    engine = VLLMEngine(folder, config, world, dtype=dtype, stop_ids=[], routed=routed)
    try:
        return _measured(actor, engine)
    finally:
        engine.close()


def _measured(actor: MegatronActor, engine: Any) -> dict[str, float]:
    engine.weight_sync(actor.manager.shards(), bucket_bytes=2**20).push(version=0)
    prompts = [
        Prompt(tuple((7 * i + 3 * n) % 131 for i in range(9 + n % 16))) for n in range(COMPLETIONS)
    ]
    completions = engine.generate(prompts, seeds=range(COMPLETIONS), sampling=Sampling(1.0))
    rows = rows_of(
        [[*p.token_ids, *a.token_ids] for p, a in zip(prompts, completions, strict=True)],
        [len(p.token_ids) for p in prompts],
    )
    theirs = torch.tensor([x for completion in completions for x in completion.logprobs])
    width = rows.tokens.shape[1] - 1
    known = [completion.routes for completion in completions if completion.routes is not None]
    told = torch.stack([expert_routes.to_length(routes, width) for routes in known])
    own = actor.log_probs(rows)
    replayed = actor.log_probs(replace(rows, routes=told))
    assert own.routes is not None
    fed = torch.arange(width) < rows.lengths[:, None] - 1
    differ = own.routes.sort(-1).values != told.sort(-1).values
    by_layer = differ.any(-1)[fed].double().mean(0)
    found = {"routed otherwise: a layer": float(by_layer.mean())}
    for name, logp in (("own experts", own.logp), ("the engine's", replayed.logp)):
        found |= {f"{name}: {what}": value for what, value in gap(logp[rows.mask], theirs).items()}
    return found


def gap(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Returns mean and largest |difference|, and the k3 estimate of the KL (Schulman)."""
    difference = (ours - theirs).double()
    k3 = difference.exp() - 1 - difference
    return {
        "mean": float(difference.abs().mean()),
        "largest": float(difference.abs().max()),
        "k3": float(k3.mean()),
    }


def with_and_without(folder: Path) -> dict[str, float]:
    model = save_tiny(folder, "qwen3-moe", **SHAPE)
    found: dict[str, float] = {}
    for dtype in ("bfloat16", "float32"):
        (seen,) = run_ranks(1, gap_body, model, dtype, timeout=300)
        found |= {f"{dtype}, {name}": value for name, value in seen.items()}
    mean = found["bfloat16, own experts: mean"]
    return found | {"gap replayed over own": found["bfloat16, the engine's: mean"] / mean}
