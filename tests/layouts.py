"""Building the real model in a rank, for tests."""

from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from rftmega.backends.megatron import MegatronActor, MegatronCritic, MegatronModelManager
from rftmega.backends.megatron.forward import custom_forward
from rftmega.config import (
    AlgorithmConfig,
    KLConfig,
    LoRA,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rftmega.core.types import Rows
from rftmega.run.placement.backend import TrainablePolicy, TrainableValues
from rftmega.run.train import built_backend
from rftmega.runtime.parallel.topology import Topology


def config_of(
    folder: Path,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig | None = None,
    *,
    dtype: str = "float32",
    temperature: float = 1.0,
    token_cap: int = 64,
    updates_per_epoch: int = 1,
    keep_reference: bool = False,
    dropout: float = 0.0,
    backend: str = "megatron",
    lora: LoRA | None = None,
    fp8: Literal["none", "blockwise"] = "none",
    router_replay: Literal["none", "trainer", "engine"] = "none",
    ema_beta: float = 0.0,
    share_prefixes: bool = True,
) -> RunConfig:
    """100 optimizer steps, whatever the number of mini-batches."""
    return RunConfig(
        backend=backend,
        model=ModelConfig(
            path=str(folder), dtype=dtype, dropout=dropout, lora=lora or LoRA(), fp8=fp8
        ),
        parallel=parallel,
        optimizer=optimizer or OptimizerConfig(learning_rate=1e-3),
        rollout=RolloutConfig(temperature=temperature, router_replay=router_replay),
        algorithm=AlgorithmConfig(
            updates_per_epoch=updates_per_epoch,
            kl=KLConfig(coef=0.1 if keep_reference else 0.0),
            ema_beta=ema_beta,
        ),
        trainer=TrainerConfig(
            steps=100 // updates_per_epoch,
            max_tokens_per_micro_batch=token_cap,
            share_prefixes=share_prefixes,
        ),
    )


def build_manager(folder: Path, parallel: ParallelConfig, **settings: Any) -> MegatronModelManager:
    return MegatronModelManager(
        config_of(folder, parallel, **settings), Topology.create(parallel, seed=1)
    )


def build_actor(
    folder: Path,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig | None = None,
    **settings: Any,
) -> MegatronActor:
    return MegatronActor(
        config_of(folder, parallel, optimizer, **settings), Topology.create(parallel, seed=1)
    )


def build_policy(
    folder: Path,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig | None = None,
    **settings: Any,
) -> TrainablePolicy:
    """Builds a policy on the backend that `settings` name."""
    config = config_of(folder, parallel, optimizer, **settings)
    return built_backend(config).policy(config)


def build_critic(
    folder: Path,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig | None = None,
    **settings: Any,
) -> MegatronCritic:
    return MegatronCritic(
        config_of(folder, parallel, optimizer, **settings), Topology.create(parallel, seed=1)
    )


def build_value_model(
    folder: Path,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig | None = None,
    **settings: Any,
) -> TrainableValues:
    """Builds a critic on the backend that `settings` name."""
    config = config_of(folder, parallel, optimizer, **settings)
    return built_backend(config).value_model(config, role="critic")


def rows_of(token_lists: list[list[int]], prompt_lengths: list[int] | None = None) -> Rows:
    lengths = torch.tensor([len(ids) for ids in token_lists])
    tokens = torch.zeros(len(token_lists), int(lengths.max()), dtype=torch.int64)
    for row, ids in enumerate(token_lists):
        tokens[row, : len(ids)] = torch.tensor(ids)
    return Rows.of_completions(
        tokens,
        torch.tensor(prompt_lengths) if prompt_lengths else torch.ones_like(lengths),
        lengths,
    )


@torch.no_grad()
def packed_logits(
    manager: MegatronModelManager, token_lists: list[list[int]]
) -> torch.Tensor | None:
    """[N, V] of all tokens that predict one, row by row, on the last stage's first tensor-parallel
    rank; None elsewhere.
    """
    rows = rows_of(token_lists)
    mask = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None] - 1
    for chunk in manager.chunks:
        chunk.eval()

    def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        next(batches)
        output = custom_forward(model, rows.tokens, mask, None, manager.config.sequence_parallel)
        return output, lambda logits, non_loss_data: gather_from_tensor_model_parallel_region(
            logits
        )

    # The interleaved schedule wants a micro-batch a stage at least.
    micro_batches = manager.topology.pipeline if len(manager.model) > 1 else 1
    found = manager.run_schedule(forward_step, range(micro_batches), forward_only=True)
    if not found or not manager.topology.speaks:
        return None
    return found[0][mask][:, : manager.description.vocabulary].clone()
