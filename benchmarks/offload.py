"""Measures moving the trainer's state off the device and back, in GB/s, against plain copies of as
many bytes.

Moving off copies into existing memory. Moving on allocates memory, since others used it in between:
it is compared with a copy that also allocates.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.models import save_model
from benchmarks.timing import compare, seconds
from rftmega.config import OptimizerConfig, ParallelConfig
from rftmega.runtime import device
from rftmega.runtime.device.residency import PARTS
from tests.layouts import build_actor
from tests.ranks import run_ranks


def offload_body(world: Any, folder: Path) -> dict[str, float]:
    return rates(
        trained_once(
            build_actor(folder, ParallelConfig(), OptimizerConfig(learning_rate=1e-5)).manager
        ),
        rounds=8,
    )


def trained_once(manager: Any) -> Any:
    """Takes an optimizer step, so that Adam has its states, and returns the residency."""
    for buffer in manager.model[0].buffers:
        buffer.grad_data.normal_()
    manager.take_step()
    return manager.residency


def rates(residency: Any, *, rounds: int) -> dict[str, float]:
    """Measures both directions and plain copies between the device and host memory of the same
    kind: pinned on CUDA.
    """
    total = sum(residency.bytes().values())
    sizes = [
        storage.nbytes()
        for storages in residency.storages().values()
        for storage in storages.values()
    ]
    source = [torch.ones(size, dtype=torch.uint8, device=device.current().here()) for size in sizes]
    target = list(device.current().host_buffer(total, torch.uint8).split(sizes))

    def off() -> None:
        residency.changed()  # otherwise data already on the host would not be copied
        residency.off(*PARTS)

    def copy_into() -> None:
        for a, b in zip(source, target, strict=True):
            b.copy_(a, non_blocking=True)

    def copy_anew() -> None:
        kept = [
            torch.empty_like(a).copy_(b, non_blocking=True)
            for a, b in zip(source, target, strict=True)
        ]
        del kept

    times: dict[str, list[float]] = {name: [] for name in ("off", "on", "into", "anew")}
    for turn in range(rounds):
        measured = {
            "off": seconds(off),
            "on": seconds(lambda: residency.on(*PARTS)),
            "into": seconds(copy_into),
            "anew": seconds(copy_anew),
        }
        for name, value in measured.items():
            if turn:  # the first is a warm-up
                times[name].append(value)
    rate = {name: total / sorted(values)[len(values) // 2] / 1e9 for name, values in times.items()}
    return {
        "gigabytes": total / 1e9,
        "off_gb_s": rate["off"],
        "copy_gb_s": rate["into"],
        "off_over_copy": rate["off"] / rate["into"],
        "on_gb_s": rate["on"],
        "copy_anew_gb_s": rate["anew"],
        "on_over_copy": rate["on"] / rate["anew"],
    }


def against_copy(folder: Path) -> dict[str, float]:
    return run_ranks(
        1, offload_body, save_model(folder, num_hidden_layers=16, hidden_size=512), timeout=300
    )[0]


PARAMETERS = 50_000_000


def adam_on_the_host(folder: Path) -> dict[str, float]:
    """Compares an Adam step on the host's cores, as with Megatron's optimizer_cpu_offload, with
    copies of main parameters and moments to the device and back, which let the device take the
    step.

    Both use host memory here. On a machine with a device the copies take the bus's time, and the
    host's step also needs gradients there and weights back: 6 bytes per parameter.
    """
    weight = torch.nn.Parameter(torch.ones(PARAMETERS))
    weight.grad = torch.full_like(weight, 1e-3)
    adam = torch.optim.AdamW([weight], lr=1e-5, fused=True)
    adam.step()  # creates the moments
    states = [torch.ones(PARAMETERS) for _ in range(3)]
    there = [torch.ones(PARAMETERS) for _ in range(3)]

    def copies() -> None:
        for mine, other in zip(states, there, strict=True):
            other.copy_(mine)
            mine.copy_(other)

    step, moved, ratio = compare(adam.step, copies, rounds=8)
    return {
        "threads": float(torch.get_num_threads()),
        "step_ns_a_parameter": step / PARAMETERS * 1e9,
        "copies_ns_a_parameter": moved / PARAMETERS * 1e9,
        "step_over_copies": 1 / ratio,
        "step_gb_s": 28
        * PARAMETERS
        / step
        / 1e9,  # weights and moments read and written, gradients read
    }
