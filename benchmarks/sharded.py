"""Compares training steps on FSDP2 with plain transformers in one process, and with torch's own
loop.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from benchmarks.models import save_model
from benchmarks.timing import compare
from rftmega.backends.fsdp.decoder_inputs import feed
from rftmega.backends.fsdp.manager import FSDPModelManager
from rftmega.config import OptimizerConfig, ParallelConfig
from tests.layouts import build_policy
from tests.ranks import run_ranks

OPTIMIZER = OptimizerConfig(learning_rate=1e-5, weight_decay=0.01)
ROWS, LENGTH = 4, 256  # of a micro-batch; equal, so that neither side gains from packing
MICRO_BATCHES = 2  # per step and process


def our_step(manager: FSDPModelManager, micro_batches: list[Tensor]) -> None:
    """Takes one optimizer step that raises the log-prob of every token. Entropies are computed as
    well.
    """
    manager.zero_grad()
    lengths = torch.full((ROWS,), LENGTH + 1)
    for number, ids in enumerate(micro_batches, start=1):
        fed = feed(ids, lengths, packed=True, where=manager.where)
        with manager.before_micro_batch(manager.network, number == len(micro_batches)):
            logp, _ = manager.network(fed.arguments, fed.places, fed.targets, 1.0)
            (-logp).sum().backward()
    manager.gather_nothing()
    manager.take_step()


def plain_step(model: nn.Module, micro_batches: list[Tensor]) -> Callable[[], None]:
    """Returns the same step in plain transformers and torch."""
    adam = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.01)

    def step() -> None:
        adam.zero_grad()
        for ids in micro_batches:
            logits = model(ids[:, :-1], use_cache=False).logits.float()
            logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            (-logp).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()

    return step


def step_body(world: Any, folder: Path) -> dict[str, float]:
    """Compares both steps; with more than one process theirs is sharded by `fully_shard`, too."""
    policy: Any = build_policy(folder, ParallelConfig(), OPTIMIZER, backend="fsdp")
    torch.manual_seed(world.rank)
    ids = torch.randint(4096, (MICRO_BATCHES * ROWS, LENGTH + 1))
    micro_batches = list(ids.split(ROWS))
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    if world.size > 1:
        for layer in plain.model.layers:
            fully_shard(layer)
        fully_shard(plain)
    theirs = plain_step(plain, micro_batches)
    found = compare(lambda: our_step(policy.manager, micro_batches), theirs, rounds=7)
    return {
        "ours_seconds": found.ours,
        "theirs_seconds": found.theirs,
        "times_theirs": 1 / found.ratio,
    }


def against_transformers(folder: Path) -> dict[str, float]:
    return run_ranks(1, step_body, save_model(folder), timeout=600)[0]


def against_fully_shard(folder: Path) -> dict[str, float]:
    return run_ranks(4, step_body, save_model(folder), timeout=600)[0]
