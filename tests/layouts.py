"""Building the real model in a rank, for tests."""

from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.megatron import MegatronActor, MegatronModelManager
from rftmega.megatron.forward import pack
from rftmega.parallel.topology import Topology
from rftmega.types import Rows


def build_manager(folder: Path, parallel: ParallelConfig, *, dtype: torch.dtype = torch.float32) -> MegatronModelManager:
    topology = Topology.create(parallel, seed=1)
    return MegatronModelManager(folder, parallel, topology, dtype=dtype, where=torch.device("cpu"))


def build_actor(
    folder: Path,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> MegatronActor:
    manager = build_manager(folder, parallel, dtype=dtype)
    manager.setup_model_and_optimizer(optimizer or OptimizerConfig(learning_rate=1e-3), optimizer_steps=100)
    return MegatronActor(manager, **({"temperature": 1.0, "token_cap": 64} | settings))


def rows_of(token_lists: list[list[int]], prompt_lengths: list[int] | None = None) -> Rows:
    lengths = torch.tensor([len(ids) for ids in token_lists])
    tokens = torch.zeros(len(token_lists), int(lengths.max()), dtype=torch.int64)
    for row, ids in enumerate(token_lists):
        tokens[row, : len(ids)] = torch.tensor(ids)
    return Rows(tokens, torch.tensor(prompt_lengths) if prompt_lengths else torch.ones_like(lengths), lengths)


@torch.no_grad()
def packed_logits(manager: MegatronModelManager, token_lists: list[list[int]]) -> torch.Tensor | None:
    """[N, V] of all tokens that predict one, packed, on the last stage's first tensor-parallel rank; None elsewhere."""
    rows = rows_of(token_lists)
    for chunk in manager.chunks:
        chunk.eval()

    def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        packed = pack(next(batches), multiple_of=manager.topology.tensor, where=manager.where)
        logits = model(packed.tokens, packed.positions, None, packed_seq_params=packed.sequence)
        return logits, lambda logits, non_loss_data: gather_from_tensor_model_parallel_region(logits)

    found = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([rows]),
        model=manager.model[0],
        num_microbatches=1,
        seq_length=1,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not found or manager.topology.tensor_rank:
        return None
    tokens = int((rows.lengths - 1).sum())
    return found[0][0, :tokens, : manager.description.vocabulary].clone()
