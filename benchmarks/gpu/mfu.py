"""Measures the model FLOPs utilisation of whole updates of an 8B-shaped stack of as many layers as
fit, with and without gradient checkpointing.

Model FLOPs are those of rftmega/backends/runner/flops.py, three times the forward pass: 6 x weights
in matrices x tokens, and for attention 12 x layers x heads x head_dim x row length x tokens (PaLM,
arXiv:2204.02311, appendix B). Recomputation adds none. The peak is that of bfloat16, by the
device's name (`rftmega/runtime/device/cuda.py`); for an unknown device only TFLOP/s are reported.
"""

import gc
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.models import (
    QWEN3_8B,
    QWEN3_30B_A3B,
    TINY,
    TINY_MOE,
    Shape,
    parameters_of,
    randomise,
    save_zeros,
)
from benchmarks.gpu.sheet import Figures, Sheet
from benchmarks.timing import median_seconds
from rftmega.algorithms.losses import policy_loss
from rftmega.backends.runner.flops import BACKWARD, forward_flops
from rftmega.config import LoRA, OptimizerConfig, ParallelConfig
from rftmega.core.types import Experience
from rftmega.runtime import device
from tests.layouts import build_policy, rows_of

USED = 0.92  # share of the device's memory; the rest is the driver's and lost to fragmentation


class Sizes(NamedTuple):
    shape: Shape  # with the maximum number of layers
    probed: tuple[int, int]  # numbers of layers at which memory is measured
    length: int  # input tokens per row
    rows: int  # per micro-batch
    micro_batches: int  # per update
    rounds: int
    dtype: str
    moe: Shape  # used instead of `shape` if `experts` is set
    experts: bool = False
    backend: str = "megatron"
    lora_rank: int = 0

    @property
    def stack(self) -> Shape:
        return self.moe if self.experts else self.shape


SIZES = Sizes(
    QWEN3_8B,
    probed=(1, 3),
    length=2048,
    rows=4,
    micro_batches=4,
    rounds=3,
    dtype="bfloat16",
    moe=QWEN3_30B_A3B,
)
SMALL = Sizes(
    TINY._replace(layers=3),
    probed=(1, 2),
    length=12,
    rows=2,
    micro_batches=2,
    rounds=1,
    dtype="float32",
    moe=TINY_MOE._replace(layers=3),
)


def measure(world: Any, sheet: Sheet, sizes: Sizes) -> None:
    found = sheet.row("layers that fit", lambda: layers_that_fit(sizes))
    layers = int(found["layers"] or 0) if found else 0
    for name, recompute in (("no recomputation", "none"), ("full recomputation", "full")):
        while layers:
            if (
                sheet.row(name, partial(speed, sizes, layers, recompute)) is not None
                or "error" in sheet.rows[name]
            ):
                break
            layers = layers * 7 // 8  # the linear estimate was too high


def layers_that_fit(sizes: Sizes) -> Figures:
    """Estimates the number of layers from the peak memory of updates of two small stacks; a device
    without memory statistics gets all layers.
    """
    backend = device.current()
    total = backend.room()
    peaks = []
    for layers in sizes.probed:
        actor = built(sizes, layers, "none")
        learn(actor, batch(sizes, 2))
        backend.forget_peak()
        learn(actor, batch(sizes, 2))
        peaks.append(backend.memory().get("most_allocated"))
        del actor
        gc.collect()  # Megatron's hooks and the model form a reference cycle
        backend.release_unused()
    few, more = peaks
    if few is None or more is None:
        return {"layers": sizes.stack.layers, "gib_a_layer": None, "gib_besides": None}
    return fitting(sizes.probed, (few, more), int(total * USED), most=sizes.stack.layers)


def fitting(probed: tuple[int, int], peaks: tuple[int, int], room: int, *, most: int) -> Figures:
    """Returns how many layers fit `room` bytes, by linear extrapolation of two measurements; from
    one to `most`.
    """
    a_layer = (peaks[1] - peaks[0]) / (probed[1] - probed[0])
    besides = peaks[0] - probed[0] * a_layer
    layers = int((room - besides) // a_layer) if a_layer > 0 else most
    return {
        "layers": max(1, min(most, layers)),
        "gib_a_layer": a_layer / 2**30,
        "gib_besides": besides / 2**30,
    }


def built(sizes: Sizes, layers: int, recompute: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        save_zeros(Path(folder), sizes.stack._replace(layers=layers), dtype=sizes.dtype)
        actor: Any = build_policy(
            Path(folder), ParallelConfig(recompute=recompute), OptimizerConfig(learning_rate=1e-6), dtype=sizes.dtype,
            token_cap=sizes.rows * (sizes.length + 1), backend=sizes.backend, lora=LoRA(rank=sizes.lora_rank),
        )  # fmt: skip
    randomise(actor.manager)
    return actor


def batch(sizes: Sizes, micro_batches: int) -> Experience:
    """Returns rows of one length, all trained."""
    torch.manual_seed(1)
    tokens = torch.randint(sizes.stack.vocabulary, (sizes.rows * micro_batches, sizes.length + 1))
    rows = rows_of(tokens.tolist())
    zeros = torch.zeros(rows.mask.shape)
    return Experience(
        rows.tokens,
        rows.prompt_lengths,
        rows.lengths,
        rows.mask,
        zeros,
        None,
        None,
        torch.ones_like(zeros),
    )


def learn(actor: Any, experience: Experience) -> None:
    actor.step(experience, policy_loss())


def speed(sizes: Sizes, layers: int, recompute: str) -> Figures:
    backend = device.current()
    actor = built(sizes, layers, recompute)
    experience = batch(sizes, sizes.micro_batches)
    seconds = median_seconds(lambda: learn(actor, experience), rounds=sizes.rounds)
    backend.forget_peak()
    learn(actor, experience)
    most = backend.memory().get("most_allocated")
    rows = [sizes.length] * len(experience)
    tflops = (1 + BACKWARD) * forward_flops(actor.description, rows) / seconds / 1e12
    peak = backend.peak_tflops() if sizes.dtype == "bfloat16" else None
    return {
        "layers": layers,
        "billion_parameters": sum(p.numel() for p in parameters_of(actor.manager)) / 1e9,
        "tokens_a_second": sum(rows) / seconds,
        "seconds_an_update": seconds,
        "tflops": tflops,
        "mfu": tflops / peak if peak else None,
        "peak_gib": most / 2**30 if most else None,
        **waits_a_micro_batch(actor, sizes),
    }


def waits_a_micro_batch(actor: Any, sizes: Sizes) -> Figures:
    """Returns the number of device synchronizations per additional micro-batch, and the code lines
    that wait, counted in an update of three.
    """
    found = []
    for micro_batches in (1, 3):
        experience = batch(sizes, micro_batches)
        with device.current().waits() as places:
            learn(actor, experience)
        found.append(places)
    one, three = found
    if one is None or three is None:
        return {"waits_a_micro_batch": None}
    often = Counter(three).most_common(10)
    return {
        "waits_a_micro_batch": (len(three) - len(one)) / 2,
        "waits": "; ".join(f"{place} x {n}" for place, n in often),
    }
