"""Measures the push of a whole model into an engine on the same device: GB/s, and microseconds per
tensor.

The engine stands in for vLLM: its parameters have the shapes of vLLM's (fused QKV, a layer's
experts in one). The additional work of vLLM's reload is measured in the part `engine`.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.models import QWEN3_8B, QWEN3_30B_A3B, TINY, TINY_MOE, Shape, save_config
from benchmarks.gpu.sheet import Figures, Sheet
from benchmarks.moe import parameters_of
from benchmarks.timing import median_seconds, seconds
from rftmega.runtime import device
from rftmega.runtime.parallel.checksum import checksums
from rftmega.weights import EngineWeights
from tests.fused_engine import FusedEngine


class Sizes(NamedTuple):
    dense: Shape
    moe: Shape
    bucket_bytes: int
    rounds: int
    copied_bytes: int  # bytes of the plain copy


SIZES = Sizes(QWEN3_8B, QWEN3_30B_A3B, bucket_bytes=256 * 2**20, rounds=5, copied_bytes=4 * 2**30)
SMALL = Sizes(TINY, TINY_MOE, bucket_bytes=30_000, rounds=2, copied_bytes=2**16)


class DeviceEngine(FusedEngine):
    """DeviceEngine keeps its parameters, and overwrites them in each load."""

    def __init__(self, shapes: Mapping[str, Iterable[int]]):
        super().__init__(0, 1, shapes, dtype=torch.bfloat16)
        where = device.current().here()
        self.kept = {
            name: torch.zeros(shape, dtype=self.dtype, device=where)
            for name, shape in self._shapes.items()
        }

    def fresh(self) -> dict[str, Tensor]:
        return dict(self.kept)


def measure(world: Any, sheet: Sheet, sizes: Sizes) -> None:
    for name, shape in (("8B", sizes.dense), ("30B-A3B", sizes.moe)):
        sheet.row(name, partial(pushed, shape, sizes))


def pushed(shape: Shape, sizes: Sizes) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        held = parameters_of(save_config(Path(folder), shape, dtype="bfloat16"), 0, 1)
    shapes = {
        name: tensor.shape
        for item in held
        for name, tensor in zip(item.hf_names, item.rule.hf, strict=True)
    }
    engine, shards = DeviceEngine(shapes), [item.shard() for item in held]
    made: list[EngineWeights] = []
    plan = seconds(
        lambda: made.append(EngineWeights(shards, engine, bucket_bytes=sizes.bucket_bytes))
    )
    (weights,) = made
    versions = count()

    def push() -> None:
        weights.push(version=next(versions))

    first = seconds(push)
    by_loader = loaded(engine)
    for parameter in engine.kept.values():
        parameter.zero_()
    later = median_seconds(push, rounds=sizes.rounds)
    equal = bool(torch.equal(loaded(engine), by_loader)) and bool(by_loader.any())
    processor = processor_seconds(push)
    total = sum(item.parameter.nbytes for item in held)
    rate = copy_rate(sizes.copied_bytes, sizes.rounds)
    return {
        "tensors": len(shapes),
        "gigabytes": total / 1e9,
        "plan_seconds": plan,
        "first_push_seconds": first,
        "push_seconds": later,
        "gb_s": total / later / 1e9,
        "copy_gb_s": rate,
        "us_a_tensor": later / len(shapes) * 1e6,
        "processor_us_a_tensor": processor / len(shapes) * 1e6,
        "equal_to_the_loader": equal,
    }


def loaded(engine: DeviceEngine) -> Tensor:
    """Returns a checksum of each parameter."""
    return torch.cat([checksums(parameter[None]) for parameter in engine.kept.values()])


def processor_seconds(work: Callable[[], None]) -> float:
    """Measures this process's CPU time until all work is queued."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def copy_rate(size: int, rounds: int) -> float:
    """Returns the GB/s of a plain copy of so many bytes within the device."""
    source = torch.ones(size, dtype=torch.uint8, device=device.current().here())
    target = torch.empty_like(source)
    return size / median_seconds(lambda: target.copy_(source), rounds=rounds) / 1e9
