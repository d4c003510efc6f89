"""Measures how evenly the work of an update is divided over four processes, by their processor time.

Rows have a long tail of lengths. Waiting for others takes no processor time, so it can be measured
with more processes than cores.
"""

import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.models import save_model
from rftmega.backends.fsdp import runner as fsdp_runner
from rftmega.backends.megatron import model_runner as megatron_runner
from rftmega.backends.runner import model_runner
from rftmega.backends.runner.flops import row_cost
from rftmega.backends.runner.micro_batches import MicroBatchPlan, plan_micro_batches
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.core.types import Experience, Rows, TokenLoss, TokenStats
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from tests.layouts import build_policy
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
RANKS, ROWS, LONGEST, ROUNDS = 4, 16, 2048, 3
RUNNERS: dict[str, ModuleType] = {"megatron": megatron_runner, "fsdp": fsdp_runner}


def experience_of(lengths: torch.Tensor) -> Experience:
    tokens = torch.randint(4096, (len(lengths), LONGEST))
    rows = Rows.of_completions(tokens, torch.full_like(lengths, 16), lengths)
    zeros = torch.zeros(rows.mask.shape)
    return Experience(
        tokens, rows.prompt_lengths, lengths, rows.mask, zeros, zeros, None, zeros + 1
    )


def raise_log_probs(stats: TokenStats, experience: Experience) -> TokenLoss:
    weight = experience.mask.float()
    return TokenLoss(-stats.logp, weight, weight.sum().to(torch.int64), {})


def body(world: Any, folder: Path, backend: str, by_tokens: bool) -> list[list[float]]:
    """Returns the processor seconds of this process's micro-batches, in each of ROUNDS updates."""
    torch.set_num_threads(1)
    policy: Any = build_policy(
        folder, ParallelConfig(), OptimizerConfig(learning_rate=1e-5), backend=backend,
        token_cap=2 * LONGEST, share_prefixes=False,
    )  # fmt: skip
    torch.manual_seed(0)
    # lognormal: most short, a few of the full length
    tail = (300 * torch.randn(RANKS * ROWS).exp()).long()
    experience = experience_of(32 + tail.clamp(max=LONGEST - 32))
    begins: list[float] = []
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if by_tokens:
            patch.setattr(model_runner, "row_cost", lambda model: float)
            patch.setattr(model_runner, "head_cost", lambda model: 0.0)
            patch.setattr(type(policy.runner), "lockstep", False)
        patch.setattr(RUNNERS[backend], "mark", lambda: begins.append(time.process_time()))
        for _ in range(1 + ROUNDS):
            begins.clear()
            policy.step(experience, raise_log_probs)
            # the optimizer step, which takes as long on every process, is part of the last one
            ends = [*begins[1:], time.process_time()]
            found.append([end - begin for begin, end in zip(begins, ends, strict=True)])
    return found[1:]


def idle_shares(folder: Path) -> dict[str, float]:
    """Returns the idle share of the slowest process's time: by total time under Megatron, whose
    processes wait for each other once, and by micro-batches under FSDP2.
    """
    save_model(folder)
    found = {}
    for backend, lockstep in (("megatron", False), ("fsdp", True)):
        for by_tokens in (False, True):
            measured = run_ranks(RANKS, body, folder, backend, by_tokens, timeout=600)
            rounds = [MicroBatchPlan([], list(costs)) for costs in zip(*measured, strict=True)]
            idle = sorted(1 - each.mean / each.slowest(lockstep) for each in rounds)
            name = "by_tokens" if by_tokens else "idle"
            found[f"{backend}: {name}"] = idle[len(idle) // 2]
    return found


def simulated_shares(folder: Path) -> dict[str, float]:
    """Returns the planned idle share of a model of 8 billion parameters: lognormal lengths of at
    most 16,384 tokens, 16 rows a rank, and micro-batches of at most 32,768 tokens.
    """
    cost = row_cost(describe(read_hf_config(ROOT / "examples" / "planning" / "qwen3-8b")))
    found = {}
    for ranks in (64, 1024):
        torch.manual_seed(0)
        tail = (2000 * torch.randn(16 * ranks).exp()).long().clamp(max=16_128)
        lengths = (256 + tail).tolist()
        for name, lockstep in (("in total", False), ("in every micro-batch", True)):
            for kind, by in (("idle", cost), ("by tokens", float)):
                plan = plan_micro_batches(
                    lengths, data_parallel=ranks, token_cap=32_768, cost=by, lockstep=lockstep
                )
                costs = [
                    [sum(cost(lengths[row]) for row in batch) for batch in batches]
                    for batches in plan.rows
                ]
                judged = plan._replace(costs=costs)
                idle = 1 - judged.mean / judged.slowest(lockstep)
                found[f"{ranks} ranks, {name}: {kind}"] = idle
    return found
