"""Measures the pipeline bubble by counting: Megatron's actual order of micro-batches is scheduled
into slots.

Every stage's order is recorded while it trains; then each forward and backward is placed in the
first slot at which its inputs are available. A forward takes one slot and a backward two (per
chunk). No clock is involved.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.models import save_model
from rftmega.backends.megatron.forward import custom_forward
from rftmega.config import OptimizerConfig, ParallelConfig
from tests.layouts import build_actor
from tests.ranks import run_ranks

SLOTS = {"forward": 1, "backward": 2}
MICRO_BATCHES = 16
Event = tuple[str, int, int]  # kind, micro-batch, chunk


def order_body(world: Any, folder: Path, parallel: ParallelConfig) -> list[Event]:
    """Returns the events of this stage, in order."""
    manager = build_actor(folder, parallel, OptimizerConfig()).manager
    ids, mask = torch.ones(1, 8, dtype=torch.int64), torch.ones(1, 8, dtype=torch.bool)
    events: list[Event] = []

    def forward_step(batches: Any, model: Any) -> Any:
        number = next(batches)
        chunk = manager.model.index(model)
        events.append(("forward", number, chunk))
        output = custom_forward(model, ids, mask, None, False)
        output.register_hook(lambda _: events.append(("backward", number, chunk)))
        return output, lambda logits: (logits.sum(), torch.tensor(1, dtype=torch.int), {})

    manager.run_schedule(forward_step, range(MICRO_BATCHES), forward_only=False)
    return events


def makespan(orders: list[list[Event]], chunks: int) -> int:
    """Returns the number of slots from the first forward to the last backward."""
    stages = len(orders)
    done: dict[tuple[int, Event], int] = {}
    free, place = [0] * stages, [0] * stages

    def needs(stage: int, event: Event) -> list[tuple[int, Event]]:
        kind, number, chunk = event
        step = chunk * stages + stage + (-1 if kind == "forward" else 1)
        wanted = [(stage, ("forward", number, chunk))] if kind == "backward" else []
        if 0 <= step < stages * chunks:
            wanted.append((step % stages, (kind, number, step // stages)))
        return wanted

    while any(place[s] < len(orders[s]) for s in range(stages)):
        before = list(place)
        for stage, order in enumerate(orders):
            if place[stage] < len(order):
                event = order[place[stage]]
                wanted = needs(stage, event)
                if all(need in done for need in wanted):
                    begin = max([free[stage], *(done[need] for need in wanted)])
                    done[stage, event] = free[stage] = begin + SLOTS[event[0]]
                    place[stage] += 1
        assert place != before, "these orders wait for each other"
    return max(free)


def bubble(folder: Path, parallel: ParallelConfig) -> dict[str, float]:
    orders = run_ranks(parallel.pipeline, order_body, folder, parallel, timeout=300)
    chunks = parallel.virtual_pipeline
    work = MICRO_BATCHES * chunks * sum(SLOTS.values())
    assert all(len(order) == 2 * MICRO_BATCHES * chunks for order in orders)
    return {
        "counted": makespan(orders, chunks) / work - 1,
        "formula": (parallel.pipeline - 1) / (MICRO_BATCHES * chunks),
    }


def of_pipelines(folder: Path) -> dict[str, float]:
    small = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 128,
        "num_attention_heads": 2,
    }
    model = save_model(folder, **small)
    cases = {
        "PP4": ParallelConfig(pipeline=4),
        "PP4 x VPP2": ParallelConfig(pipeline=4, virtual_pipeline=2),
    }
    return {
        f"{name} {key}": value
        for name, case in cases.items()
        for key, value in bubble(model, case).items()
    }
