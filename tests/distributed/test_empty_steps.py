"""A mini-batch without a token to learn from moves nothing: no weight decay, no step of Adam."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.algorithms.losses import policy_loss
from rftmega.config import LoRA, OptimizerConfig, ParallelConfig
from rftmega.weights import Exporter
from tests.layouts import build_policy, rows_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

P = ParallelConfig
TEXTS = [[1, 2, 3, 4, 9, 8], [5, 6, 7], [7, 8, 9, 10, 11], [3, 1, 2]]
OPTIMIZER = OptimizerConfig(epsilon=1e-4, learning_rate=1e-2, weight_decay=0.5, warmup_steps=5)


def body(
    world: Any, folder: Path, parallel: ParallelConfig, backend: str, optimizer: Any, rank: int
) -> Any:
    from rftmega.core.types import Experience

    lora = LoRA(rank=rank)
    actor = build_policy(folder, parallel, optimizer, backend=backend, lora=lora)
    rows = rows_of(TEXTS)
    scored = actor.log_probs(rows).logp
    columns = (rows.tokens, rows.prompt_lengths, rows.lengths)
    full = Experience(*columns, rows.mask, scored, scored, None, torch.ones_like(scored))
    empty = replace(full, mask=torch.zeros_like(rows.mask))
    one = torch.zeros_like(rows.mask)
    one[2] = rows.mask[2]  # one row of one process

    def weights() -> dict[str, torch.Tensor]:
        actor.residency.finish()
        shards = actor.shards()
        exporter = Exporter(shards, actor.replica_group, bucket_bytes=2**20)
        return {name: x.clone() for name, x in exporter}

    def step(experience: Any) -> tuple[float, ...]:
        found = actor.step(experience, policy_loss())
        names = ("optimizer_steps", "skipped_steps", "empty_steps", "learning_rate")
        return tuple(found[name] for name in names)

    before = weights()
    told = [step(empty), step(empty)]
    between = weights()
    told += [step(replace(full, mask=one)), step(empty), step(full)]
    after = weights()
    same = all(torch.equal(before[name], x) for name, x in between.items())
    moved = any(not torch.equal(before[name], x) for name, x in after.items())
    return told, same, moved, actor.counters() if backend == "fsdp" else None


@pytest.mark.parametrize(
    ("processes", "parallel", "backend", "distributed", "rank"),
    [
        (2, P(), "megatron", True, 0),
        pytest.param(2, P(tensor=2), "megatron", False, 4, marks=pytest.mark.ranks),
        pytest.param(2, P(pipeline=2), "megatron", False, 0, marks=pytest.mark.ranks),
        pytest.param(2, P(), "fsdp", False, 0, marks=pytest.mark.ranks),
        (2, P(tensor=2), "fsdp", False, 4),
    ],
)
def test_a_mini_batch_without_trainable_rows_moves_nothing_on_any_process(
    processes: int,
    parallel: ParallelConfig,
    backend: str,
    distributed: bool,
    rank: int,
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    optimizer = replace(OPTIMIZER, distributed=distributed)
    for told, same, moved, counters in run_ranks(
        processes, body, folder, parallel, backend, optimizer, rank
    ):
        assert same, "weights moved, though there was nothing to learn"
        assert moved
        assert [each[:3] for each in told] == [
            (0, 0, 1),
            (0, 0, 1),
            (1, 0, 0),
            (0, 0, 1),
            (1, 0, 0),
        ]
        rates = [each[3] for each in told]
        # the schedule goes on with steps that are taken: of five, of warm-up
        wanted = [2e-3, 2e-3, 2e-3, 4e-3, 4e-3]
        assert rates == pytest.approx(wanted)
        assert counters in (None, {"adam_steps": 2, "schedule_steps": 2})
