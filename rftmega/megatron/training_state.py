"""Every tensor that training goes on from, as boxes of the whole model's tensors: the same names
under every layout.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rftmega.device.held_weights import AveragedWeights
from rftmega.megatron.manager import MegatronModelManager
from rftmega.megatron.offload import inner_optimizers
from rftmega.megatron.shard_boxes import boxes_of
from rftmega.megatron.sharded import CheckpointBox
from rftmega.shards import ShardBox

WEIGHTS, AVERAGE, MAIN, FIRST, SECOND = "weights", "average", "main", "exp_avg", "exp_avg_sq"


def model_tensors(
    manager: MegatronModelManager, average: AveragedWeights | None
) -> Iterator[ShardBox]:
    """Yields weights and, where one is kept, their average."""
    for number, item in enumerate(manager.bound):
        weights = manager.residency.host(item.parameter.detach())
        for piece in manager.pieces[number]:
            yield _held(WEIGHTS, piece, weights)
            if average is not None:
                yield _held(AVERAGE, piece, average.held[number])


def _held(kind: str, piece: CheckpointBox, tensor: Tensor) -> ShardBox:
    written = not any(piece.replica)
    return ShardBox(
        f"{kind}/{piece.key}",
        piece.global_shape,
        piece.padded,
        piece.offset,
        piece.of(tensor),
        written,
    )


def optimizer_tensors(manager: MegatronModelManager) -> Iterator[ShardBox]:
    """Yields main parameters, where they are not the weights themselves, and Adam's states, where
    there are any yet.
    """
    numbers = {id(item.parameter): number for number, item in enumerate(manager.bound)}
    for inner in inner_optimizers(manager.optimizer):
        for parameter, main, begin in _owned(inner):
            state = inner.optimizer.state.get(main, {})
            tensors = {name: state[name] for name in (FIRST, SECOND) if name in state}
            if main.dtype != parameter.dtype:
                tensors[MAIN] = main.detach()
            tensors = {kind: manager.residency.host(tensor) for kind, tensor in tensors.items()}
            for piece in manager.pieces[numbers[id(parameter)]]:
                for kind, tensor in tensors.items():
                    yield from _ranges(kind, piece, tensor, begin, sharded=_is_sharded(inner))


def _is_sharded(inner: Any) -> bool:
    """Returns True where data-parallel processes share the state (Megatron's DistributedOptimizer)."""
    return hasattr(inner, "model_param_gbuf_map")


def _owned(inner: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yields (parameter, what the optimizer steps in its place, where in the flattened parameter
    that begins).
    """
    if inner.optimizer is None:  # a process without trainable parameters
        return
    if _is_sharded(inner):
        for parameter in inner.model_param_gbuf_map:
            main = inner._get_main_param_and_optimizer_states(parameter)["param"]
            yield parameter, main, inner._get_model_param_range_map(parameter)["param"].start
        return
    groups = zip(
        getattr(inner, "float16_groups", ()),
        getattr(inner, "fp32_from_float16_groups", ()),
        strict=True,
    )
    halves = {
        id(main): parameter
        for group, mains in groups
        for parameter, main in zip(group, mains, strict=True)
    }
    for group in inner.optimizer.param_groups:
        yield from ((halves.get(id(main), main), main, 0) for main in group["params"])


def _ranges(
    kind: str, piece: CheckpointBox, tensor: Tensor, begin: int, *, sharded: bool
) -> Iterator[ShardBox]:
    """Yields the boxes of `piece` within `tensor`, which holds elements `begin` ... of the
    flattened parameter.
    """
    written = not any(piece.replica[:2] if sharded else piece.replica)
    size = tensor.numel()
    local = piece.shape[len(piece.shape) - len(piece.stride) :]
    assert torch.empty(local, device="meta").stride() == piece.stride, (
        f"{piece.key} is no range of its parameter"
    )
    low, high = max(begin, piece.begin), min(begin + size, piece.begin + torch.Size(local).numel())
    at = low - begin
    for offset, shape in boxes_of(piece.shape, low - piece.begin, high - piece.begin):
        box = tensor.as_strided(
            (number := torch.Size(shape).numel(),), (1,), tensor.storage_offset() + at
        ).view(shape)
        at += number
        place = tuple(a + b for a, b in zip(piece.offset, offset, strict=True))
        yield ShardBox(f"{kind}/{piece.key}", piece.global_shape, piece.padded, place, box, written)


def adam_steps(manager: MegatronModelManager) -> int:
    """Returns the optimizer steps that Adam has counted; 0 where it has no states yet."""
    for inner in inner_optimizers(manager.optimizer):
        if inner.optimizer is not None and inner.optimizer.state:
            state = next(iter(inner.optimizer.state.values()))
            return int(
                state["step"] if "step" in state else inner.optimizer.param_groups[0]["step"]
            )
    return 0


@torch.no_grad()
def set_adam_steps(manager: MegatronModelManager, steps: int) -> None:
    """Makes Adam's states, whose content is then whatever is copied into them; at 0 steps there are
    none.
    """
    for inner in inner_optimizers(manager.optimizer):
        if inner.optimizer is None:
            continue
        if not steps:
            inner.optimizer.state.clear()
            for group in inner.optimizer.param_groups:
                group.pop("step", None)  # of fused ones
            continue
        # fused ones count for a whole group
        in_group = not isinstance(inner.optimizer, torch.optim.Adam)
        for group in inner.optimizer.param_groups:
            if in_group:
                group["step"] = steps
            for main in group["params"]:
                state = inner.optimizer.state[main]
                for name in (FIRST, SECOND):
                    if name not in state:
                        state[name] = torch.zeros_like(main, dtype=torch.float32)
                if not in_group:
                    state["step"] = torch.tensor(float(steps))


def schedule_steps(manager: MegatronModelManager) -> int:
    """Returns the number of steps that the learning rate's schedule has taken."""
    return int(manager.scheduler.num_steps)


def set_schedule_steps(manager: MegatronModelManager, steps: int) -> None:
    manager.scheduler.num_steps = steps
    manager.scheduler.step(0)
