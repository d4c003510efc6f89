"""Adapters on FSDP2 learn as in plain torch and as on Megatron in every layout, and nothing else
learns.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.checkpoint.run_checkpoints import TrainingCheckpoints
from rftmega.checkpoint.training import TrainingReader
from rftmega.config import LoRA, OptimizerConfig, ParallelConfig
from rftmega.device.residency import ADAM, GRADIENTS, PARAMETERS, PARTS
from rftmega.errors import CheckpointError, NothingLearnt
from rftmega.experience import given
from rftmega.fsdp import adapters
from rftmega.strategy.export import export
from rftmega.weights import EngineWeights, Exporter
from tests import plain_adapters
from tests.block_engine import BlockEngine
from tests.distributed.test_adapters import (
    ALPHA,
    MERGED,
    RANK,
    ROWS,
    STEPS,
    assert_drops,
    whole,
)
from tests.layouts import build_policy, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
TOLERANCE = 1e-5
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4, weight_decay=0.1, clip_grad=0.5)
LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "FSDP 1": (1, P()),
    "FSDP 2": (2, P()),
    "FSDP 2, full recompute": (2, P(recompute="full")),
    "FSDP 1 x TP2": (2, P(tensor=2)),
    "2 replicas": (2, P(replicas=2)),
    "FSDP 2, ZeRO-2": (2, P(reshard_after_forward=False)),
    "FSDP 2, on the host": (2, P(cpu_offload=True)),
    "FSDP 3": (3, P()),  # blocks of 2, 2 and 0 rows of A
    "FSDP 2 x TP2, full recompute": (4, P(tensor=2, recompute="full")),
    "2 replicas x 2": (4, P(replicas=2)),
    "2 replicas x TP2": (4, P(replicas=2, tensor=2)),
}


def policy_of(
    folder: Path,
    parallel: ParallelConfig,
    adapter: Path | str = "",
    targets: tuple[str, ...] = (),
    *,
    backend: str = "fsdp",
    rank: int = RANK,
    dropout: float = 0.0,
    **settings: Any,
) -> Any:
    lora = LoRA(rank=rank, alpha=ALPHA, targets=list(targets), path=str(adapter), dropout=dropout)
    return build_policy(folder, parallel, OPTIMIZER, lora=lora, backend=backend, **settings)


def learn(actor: Any, steps: int) -> list[tuple[float, float]]:
    found = [actor.step(given(rows_of(ROWS)), cross_entropy_loss()) for _ in range(steps)]
    return [(metrics["loss"], metrics["grad_norm"]) for metrics in found]


def learn_body(
    world: Any, folder: Path, adapter: Path, parallel: ParallelConfig, *more: Any
) -> Any:
    actor = policy_of(folder, parallel, adapter, *more)
    told = learn(actor, STEPS)
    actor.residency.finish()
    return told, whole(actor.adapters().shards, actor)


def assert_learns_as_plain_torch(
    tmp_path: Path,
    variant: str,
    processes: int,
    parallel: ParallelConfig,
    targets: tuple[str, ...] = (),
) -> None:
    folder = save_tiny(tmp_path / "model", variant)
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=targets or plain_adapters.ALL)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    model = plain_adapters.adapted(folder, pairs, alpha=ALPHA)
    wanted = plain_adapters.learn(
        model,
        ROWS,
        steps=STEPS,
        clip=OPTIMIZER.clip_grad,
        lr=OPTIMIZER.learning_rate,
        eps=OPTIMIZER.epsilon,
        weight_decay=OPTIMIZER.weight_decay,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
    )
    assert wanted[-1][0] < wanted[0][0] - 0.05, "nothing was learnt, so nothing was compared"
    for told, found in run_ranks(processes, learn_body, folder, adapter, parallel, targets):
        for ours, theirs in zip(told, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE)
        for module, pair in plain_adapters.pairs_of(model, pairs).items():
            matrices = [found[f"{module}.lora_{letter}.weight"] for letter in "AB"]
            torch.testing.assert_close(matrices, list(pair), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_three_steps_of_adapters_are_those_of_plain_torch(name: str, tmp_path: Path) -> None:
    assert_learns_as_plain_torch(tmp_path, "qwen3", *LAYOUTS[name])
