"""Compares the divergence of two models computed in chunks from hidden states with the dense one:
time and peak memory, forward and backward.
"""

import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import seconds
from rftmega.models.kernels.chunked_head import Head
from rftmega.models.kernels.linear_divergence import DivergenceKind, linear_divergence
from rftmega.models.kernels.linear_log_probs import VocabularyShard
from tests.ranks import run_ranks

POSITIONS, VOCABULARY, STUDENT, TEACHER = 4096, 32768, 512, 768


def dense(hidden: Tensor, taught: Tensor, weight: Tensor, of_teacher: Tensor) -> Tensor:
    log_p = (hidden @ weight.T).log_softmax(-1)
    with torch.no_grad():
        log_q = (taught @ of_teacher.T).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def chunked(hidden: Tensor, taught: Tensor, weight: Tensor, of_teacher: Tensor) -> Tensor:
    shard = VocabularyShard(0, len(weight), None)
    heads = Head(weight), Head(of_teacher)
    return linear_divergence(hidden, taught, *heads, DivergenceKind("reverse_kl"), 1.0, shard)


def measured_body(world: Any, way: str) -> dict[str, float]:
    """Measures one way, in its own process, since peak memory can't be reset."""
    torch.manual_seed(0)
    hidden = torch.randn(POSITIONS, STUDENT, requires_grad=True)
    weight = (0.05 * torch.randn(VOCABULARY, STUDENT)).requires_grad_()
    taught, of_teacher = (
        torch.randn(POSITIONS, TEACHER),
        0.05 * torch.randn(VOCABULARY, TEACHER),
    )

    def work() -> None:
        (dense if way == "dense" else chunked)(hidden, taught, weight, of_teacher).sum().backward()
        hidden.grad = weight.grad = None

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"seconds": min(seconds(work) for _ in range(3)), "peak_mib": peak}


def chunked_against_dense(folder: Path) -> dict[str, float]:
    ways = {way: run_ranks(1, measured_body, way, timeout=600)[0] for way in ("chunked", "dense")}
    return {
        f"{way}_{name}": value for way, found in ways.items() for name, value in found.items()
    } | {
        "memory_ratio": ways["chunked"]["peak_mib"] / ways["dense"]["peak_mib"],
        "time_ratio": ways["chunked"]["seconds"] / ways["dense"]["seconds"],
    }
