"""Compares chunked with dense computation of log-prob and entropy from hidden states: peak memory
and TFLOP/s, forward and backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.sheet import Figures, Sheet
from benchmarks.log_probs import dense, fused
from benchmarks.timing import median_seconds
from rftmega.runtime import device

Way = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Sizes(NamedTuple):
    tokens: int
    vocabulary: int
    hidden: int
    dtype: str
    rounds: int


SIZES = Sizes(tokens=16384, vocabulary=151936, hidden=4096, dtype="bfloat16", rounds=5)
SMALL = Sizes(tokens=96, vocabulary=151, hidden=32, dtype="float32", rounds=2)


def measure(world: Any, sheet: Sheet, sizes: Sizes) -> None:
    torch.manual_seed(0)
    where, dtype = device.current().here(), getattr(torch, sizes.dtype)
    hidden = torch.randn(sizes.tokens, sizes.hidden, device=where, dtype=dtype).requires_grad_()
    weight = (
        0.02 * torch.randn(sizes.vocabulary, sizes.hidden, device=where, dtype=dtype)
    ).requires_grad_()
    targets = torch.randint(sizes.vocabulary, (sizes.tokens,), device=where)
    for name, way in (("fused", fused), ("dense", dense)):
        sheet.row(name, partial(speed, way, hidden, weight, targets, sizes.rounds))
    sheet.row("fused against dense", lambda: differences(hidden, weight, targets, sheet))


def trained(way: Way, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Returns log-prob, entropy, and the gradients of hidden states and weight."""
    hidden.grad = weight.grad = None
    logp, entropy = way(hidden, weight, targets)
    (logp.sum() + 0.01 * entropy.sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    found = logp.detach(), entropy.detach(), hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    return found


def speed(way: Way, hidden: Tensor, weight: Tensor, targets: Tensor, rounds: int) -> Figures:
    """Measures one way. TFLOP/s count the mathematically required products (6 x tokens x hidden x
    vocabulary), without recomputation.
    """
    backend = device.current()
    seconds = median_seconds(lambda: trained(way, hidden, weight, targets), rounds=rounds)
    before = backend.memory()
    backend.forget_peak()
    trained(way, hidden, weight, targets)
    most = backend.memory().get("most_allocated")  # not recorded on a CPU
    tflops = 6 * hidden.numel() * len(weight) / seconds / 1e12
    peak = backend.peak_tflops() if hidden.dtype == torch.bfloat16 else None
    return {
        "seconds": seconds,
        "peak_gib": None if most is None else (most - before["allocated"]) / 2**30,
        "tflops": tflops,
        "share_of_peak": tflops / peak if peak else None,
    }


def differences(hidden: Tensor, weight: Tensor, targets: Tensor, sheet: Sheet) -> Figures:
    """Returns the ratios of the two rows, and the largest differences between their numbers; those
    of gradients are relative to the largest.
    """
    ours, theirs = trained(fused, hidden, weight, targets), trained(dense, hidden, weight, targets)
    largest = [
        float((a.float() - b.float()).abs().max()) for a, b in zip(ours, theirs, strict=True)
    ]
    scale = [float(x.float().abs().max()) for x in theirs]
    one, other = sheet.rows["fused"], sheet.rows["dense"]
    return {
        "memory_ratio": one["peak_gib"] / other["peak_gib"]
        if one["peak_gib"] and other["peak_gib"]
        else None,
        "time_ratio": one["seconds"] / other["seconds"],
        "logp_difference": largest[0],
        "entropy_difference": largest[1],
        "hidden_gradient_difference": largest[2] / scale[2],
        "weight_gradient_difference": largest[3] / scale[3],
    }
