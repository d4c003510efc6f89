"""Lists the tensors of a Megatron model and its optimizer by component, for `device.residency` to
move them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from rftmega.backends.optimizers.moments import memory_of
from rftmega.runtime.device.residency import ADAM, GRADIENTS, MAIN_PARAMETERS, PARAMETERS


def parts_of(
    model: Iterable[Any], optimizer: Any, borrowed: Sequence[Tensor] = ()
) -> dict[str, list[Tensor]]:
    """Returns the tensors of a wrapped or unwrapped model and its optimizer, which may be None, by
    component: parameters, gradients, main parameters, Adam states.
    `borrowed` parameters belong to another model and are left out.
    """
    chunks = list(model)
    others = {id(tensor) for tensor in borrowed}
    wrapped = [chunk for chunk in chunks if hasattr(chunk, "expert_parallel_buffers")]
    buffers = [
        buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    return {
        # not .data, whose writes would not be counted
        PARAMETERS: [p for chunk in chunks for p in chunk.parameters() if id(p) not in others],
        GRADIENTS: [buffer.grad_data for buffer in buffers],
        MAIN_PARAMETERS: list(main_parameters(optimizer)),
        ADAM: [x for inner in inner_optimizers(optimizer) for state in _adam(inner) for x in state],
    }


def inner_optimizers(optimizers: Any) -> list[Any]:
    """Returns Megatron's single optimizers as a list: the members of a chained optimizer or of a
    list, or the given optimizer itself; [] for None.
    """
    if optimizers is None:
        return []
    if isinstance(optimizers, list | tuple):
        return [inner for optimizer in optimizers for inner in inner_optimizers(optimizer)]
    return list(getattr(optimizers, "chained_optimizers", [optimizers]))


def main_parameters(optimizers: Any) -> Iterator[Tensor]:
    """Yields the fp32 main parameters, the optimizer's copies of half-precision parameters, of any
    kind of Megatron optimizers; fp32 parameters have no copies.
    """
    for inner in inner_optimizers(optimizers):
        for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            for group in getattr(inner, name, ()):
                yield from (p.data for p in group if p is not None)


def _adam(inner: Any) -> Iterator[list[Tensor]]:
    if inner.optimizer is None:  # a process without trainable parameters
        return
    for state in inner.optimizer.state.values():
        # the step count is a host number
        moments = [x for x in state.values() if isinstance(x, Tensor) and x.dim() > 0]
        yield [part for moment in moments for part in memory_of(moment)]
