"""Lists the tensors of the training state as blocks of Hugging Face tensors, with the same names in
every layout and backend.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rftmega.backends.megatron.manager import MegatronModelManager
from rftmega.backends.optimizers.moments import MomentValues
from rftmega.backends.optimizers.offload import inner_optimizers
from rftmega.checkpoints.reader import is_distributed
from rftmega.converters.shard_boxes import boxes_of
from rftmega.converters.shards import shapes_of, shard_parts
from rftmega.core.shards import ShardBox, ShardPart, narrowed, shape_of
from rftmega.models.hf.stacked_files import open_folder
from rftmega.runtime.device.held_weights import AveragedWeights

WEIGHTS, AVERAGE, MAIN, FIRST, SECOND = "weights", "average", "main", "exp_avg", "exp_avg_sq"
MOMENTUM = "momentum_buffer"  # of Muon


def model_tensors(
    manager: MegatronModelManager, average: AveragedWeights | None
) -> Iterator[ShardBox]:
    """Yields a ShardBox for each block of a Hugging Face tensor in this process's trained weights
    and, if `average` is given, in their moving average.

    With adapters, only the adapters' tensors are trained.
    """
    for number, item in enumerate(manager.trained):
        weights = manager.residency.host(item.parameter.detach())
        for name, shape, part, written in _parts(manager, number):
            yield _held(WEIGHTS, name, shape, part, weights, written)
            if average is not None:
                yield _held(AVERAGE, name, shape, part, average.held[number], written)


def _held(
    kind: str, name: str, shape: tuple[int, ...], part: ShardPart, tensor: Tensor, written: bool
) -> ShardBox:
    ends = zip(part.offset, shape_of(part.box), strict=True)
    local = tuple((start, start + size) for start, size in ends)
    offset = tuple(start for start, _ in part.box)
    return ShardBox(f"{kind}/{name}", shape, False, offset, narrowed(tensor, local), written)


def _parts(
    manager: MegatronModelManager, number: int, *, sharded: bool = False
) -> Iterator[tuple[str, tuple[int, ...], ShardPart, bool]]:
    """Yields (HF name, shape of the HF tensor, block of it in this process's tensor, whether this
    process writes the block to a checkpoint) for trained tensor `number`.
    `sharded`: data-parallel processes hold different ranges of the tensor.
    """
    item = manager.trained[number]
    # pipeline-, tensor- and data-parallel processes with the same tensor
    replicas = [replica[:2] if sharded else replica for replica in manager.replicas[number]]
    written = not any(any(replica) for replica in replicas)
    names, shapes = item.hf_names, shapes_of(item.rule)
    for part in shard_parts(item.rule, item.rank, item.ranks):
        if manager.adapters is None or not manager.adapters.is_filler(names[part.number]):
            yield names[part.number], shapes[part.number], part, written


def optimizer_tensors(
    manager: MegatronModelManager, moments: MomentValues | None = None
) -> Iterator[ShardBox]:
    """Yields the main parameters, if they are separate from the weights, and the optimizer's
    moments, if they exist yet.
    Moments are yielded in float32, however they are stored; `moments` keeps track of values that
    are copies.
    """
    moments = moments or MomentValues(manager.residency)
    numbers = {id(item.parameter): number for number, item in enumerate(manager.trained)}
    for inner in inner_optimizers(manager.optimizer):
        for parameter, main, begin in _owned(inner):
            state = inner.optimizer.state.get(main, {})
            tensors = {name: moments.of(state[name]) for name in _moments(inner) if name in state}
            if main.dtype != parameter.dtype:
                tensors[MAIN] = manager.residency.host(main.detach())
            number = numbers[id(parameter)]
            for name, shape, part, written in _parts(manager, number, sharded=_is_sharded(inner)):
                for kind, tensor in tensors.items():
                    for offset, elements in _range(part, parameter, tensor, begin):
                        yield ShardBox(f"{kind}/{name}", shape, False, offset, elements, written)


@torch.no_grad()
def read_main_parameters(manager: MegatronModelManager) -> None:
    """Reads the float32 main parameters from the model's folder if the folder's dtype is more
    precise than that of the weights.

    Megatron derives main parameters from the weights, which are rounded already: optimizer steps
    smaller than the rounding would be lost.
    """
    path = manager.cfg.model.path
    if is_distributed(path):
        return
    files = open_folder(path, manager.hf_config)
    width = manager.config.params_dtype.itemsize
    for box in optimizer_tensors(manager):
        kind, _, name = box.key.partition("/")
        if kind == MAIN and name in files and files.dtype_of(name).itemsize > width:
            ends = zip(box.offset, box.tensor.shape, strict=True)
            slices = tuple(slice(start, start + size) for start, size in ends)
            box.tensor.copy_(files.slice_of(name, box.shape)[slices])


def _moments(inner: Any) -> tuple[str, ...]:
    """Returns the names of the moments in the state of the optimizer `inner`: Adam's or Muon's."""
    of_muon = hasattr(inner.optimizer, "orthogonalize")
    return (MOMENTUM,) if of_muon else (FIRST, SECOND)


def _is_sharded(inner: Any) -> bool:
    """Returns whether the optimizer's state is sharded over data-parallel processes (Megatron's
    DistributedOptimizer).
    """
    return hasattr(inner, "model_param_gbuf_map")


def _owned(inner: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yields, for each parameter that the Megatron optimizer `inner` updates on this process:
    (model parameter, the tensor that is updated for it, index of that tensor's first element in the
    flattened parameter).
    """
    if inner.optimizer is None:  # a process without trainable parameters
        return
    if _is_sharded(inner):
        for parameter in inner.model_param_gbuf_map:
            # Megatron's own look-up would create an empty Adam state
            group, order = inner.model_param_group_index_map[parameter]
            main = inner.optimizer.param_groups[group]["params"][order]
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


def _range(
    part: ShardPart, parameter: Tensor, tensor: Tensor, begin: int
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields (offset in the HF tensor, elements) of the blocks of `part` that lie within `tensor`,
    which holds the elements of the flattened parameter from index `begin` on.
    """
    local = shape_of(part.box)
    rows = (local[0], *parameter.shape[1:])  # in memory
    assert local == rows or _ends_in_padding(part, parameter), f"{part} is no range of {rows}"
    first = part.offset[0] * math.prod(rows[1:])  # of the part, in the flattened parameter
    low, high = max(begin, first), min(begin + tensor.numel(), first + math.prod(rows))
    at = low - begin
    for offset, shape in boxes_of(rows, low - first, high - first):
        number = math.prod(shape)
        elements = tensor.as_strided((number,), (1,), tensor.storage_offset() + at).view(shape)
        at += number
        if local != rows:
            if offset[1] >= local[1]:
                continue  # padding alone
            elements = elements[:, : local[1] - offset[1]]
        ends = zip(part.box, offset, strict=True)
        yield tuple(start + inside for (start, _), inside in ends), elements


def _ends_in_padding(part: ShardPart, parameter: Tensor) -> bool:
    """Returns whether `part` consists of the first columns of all rows of the matrix `parameter`,
    whose other columns are padding of the vocabulary.
    """
    return part.offset == (0, 0) and shape_of(part.box)[0] == len(parameter)


def adam_steps(manager: MegatronModelManager) -> int:
    """Returns the number of optimizer steps in Adam's state; 0 if Adam has no state yet."""
    for inner in inner_optimizers(manager.optimizer):
        if inner.optimizer is not None and inner.optimizer.state and FIRST in _moments(inner):
            state = next(iter(inner.optimizer.state.values()))
            return int(
                state["step"] if "step" in state else inner.optimizer.param_groups[0]["step"]
            )
    return 0


@torch.no_grad()
def set_adam_steps(manager: MegatronModelManager, steps: int) -> None:
    """Replaces the optimizer's state by zero moments with the given number of steps, to be filled
    afterwards; at 0 steps, removes the state.
    """
    for inner in inner_optimizers(manager.optimizer):
        if inner.optimizer is None:
            continue
        if not steps:
            inner.optimizer.state.clear()
            for group in inner.optimizer.param_groups:
                group.pop("step", None)  # of fused optimizers
            continue
        _begin_states(inner.optimizer, steps, _moments(inner))


def _begin_states(optimizer: Any, steps: int, moments: tuple[str, ...]) -> None:
    """Adds to an optimizer the state that it would have after `steps` steps, but with zero moments."""
    narrow = getattr(optimizer, "moment", None)
    counts = FIRST in moments  # Muon counts no steps
    # fused optimizers count for a whole group
    in_group = counts and narrow is None and not isinstance(optimizer, torch.optim.Adam)
    for group in optimizer.param_groups:
        if in_group:
            group["step"] = steps
        for main in group["params"]:
            state = optimizer.state[main]
            for name in moments:
                if name in state:
                    continue
                if narrow is None:
                    state[name] = torch.zeros_like(main, dtype=torch.float32)
                else:
                    state[name] = narrow(main, signed=name == FIRST)
            if counts and not in_group:
                state["step"] = torch.tensor(float(steps))


def schedule_steps(manager: MegatronModelManager) -> int:
    """Returns the number of optimizer steps taken, according to the learning-rate schedule, whose
    own counter is one step ahead.
    """
    return int(manager.lr_scheduler.num_steps) - 1


def set_schedule_steps(manager: MegatronModelManager, steps: int) -> None:
    manager.lr_scheduler.num_steps = steps + 1
    manager.lr_scheduler.step(0)
