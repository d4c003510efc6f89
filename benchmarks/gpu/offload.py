"""Measures moving a policy's weights, gradients and optimizer off the device and back: GB/s against
plain pinned copies, and bitwise equality.
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.models import TINY, Shape, randomise, save_zeros
from benchmarks.gpu.sheet import Figures, Sheet
from benchmarks.offload import rates, trained_once
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.runtime.device.residency import ADAM, MAIN_PARAMETERS, PARAMETERS, PARTS
from tests.layouts import build_actor


class Sizes(NamedTuple):
    shape: Shape
    dtype: str
    rounds: int
    cycles: int


# 1.04 billion parameters: 19 GB with gradients and Adam, and as much again of pinned memory for the
# plain copies.
SIZES = Sizes(Shape(4, 4096, 12288, 32, 8, 128, 32768), dtype="bfloat16", rounds=6, cycles=3)
SMALL = Sizes(TINY, dtype="bfloat16", rounds=3, cycles=3)


def measure(world: Any, sheet: Sheet, sizes: Sizes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_zeros(Path(folder), sizes.shape, dtype=sizes.dtype)
        optimizer = OptimizerConfig(learning_rate=1e-5)
        manager = build_actor(Path(folder), ParallelConfig(), optimizer, dtype=sizes.dtype).manager
    randomise(manager)
    residency = trained_once(manager)
    sheet.row("three cycles", lambda: cycles(residency, sizes.cycles))
    sheet.row("off and on", lambda: rates(residency, rounds=sizes.rounds))


def cycles(residency: Any, number: int) -> Figures:
    """Moves everything off, weights on as for scoring, then everything on, and checks that nothing
    has changed.
    """
    kept = {
        part: [x.clone() for x in contents(residency, part)]
        for part in (PARAMETERS, MAIN_PARAMETERS, ADAM)
    }
    equal = 0
    for _ in range(number):
        residency.only()
        assert sum(residency.bytes().values()) == 0, "something stayed on the device"
        residency.only(PARAMETERS)
        residency.on(*PARTS)
        equal += all(
            torch.equal(a, b)
            for part, wanted in kept.items()
            for a, b in zip(contents(residency, part), wanted, strict=True)
        )
        residency.changed()  # makes the next offload copy everything again
    return {
        "cycles": number,
        "equal": equal,
        "gigabytes": sum(x.nbytes for part in kept.values() for x in part) / 1e9,
    }


def contents(residency: Any, part: str) -> list[Tensor]:
    """Returns the bytes of each storage of a part."""
    storages = residency.storages()[part].values()
    return [
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for storage in storages
    ]
