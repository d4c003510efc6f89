"""Compares chunked with dense computation of log-prob and entropy from hidden states: time and peak
memory, forward and backward.
"""

import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import seconds
from rftmega.models.kernels.linear_log_probs import VocabularyShard, linear_stats
from tests.ranks import run_ranks

TOKENS, VOCABULARY, HIDDEN = 4096, 32768, 512


def dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.T).float().log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return linear_stats(hidden, weight, targets, 1.0, VocabularyShard(0, len(weight), None))


def measured_body(world: Any, way: str) -> dict[str, float]:
    """Measures one way, in its own process, since peak memory can't be reset."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = (0.05 * torch.randn(VOCABULARY, HIDDEN)).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,))

    def work() -> None:
        logp, entropy = (dense if way == "dense" else fused)(hidden, weight, targets)
        (logp.sum() + 0.01 * entropy.sum()).backward()
        hidden.grad = weight.grad = None

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"seconds": min(seconds(work) for _ in range(3)), "peak_mib": peak}


def fused_against_dense(folder: Path) -> dict[str, float]:
    ways = {way: run_ranks(1, measured_body, way, timeout=600)[0] for way in ("fused", "dense")}
    return {
        f"{way}_{name}": value for way, found in ways.items() for name, value in found.items()
    } | {
        "memory_ratio": ways["fused"]["peak_mib"] / ways["dense"]["peak_mib"],
        "time_ratio": ways["fused"]["seconds"] / ways["dense"]["seconds"],
    }
