"""Predicts the memory of an FSDP2 process (torch 2.13): weights, gradients, Adam and gathered
layers.

Each parameter is split by rows into equal blocks over the processes of a replica; the last block may
be shorter, but takes the same memory. Each group of parameters is gathered while the group before
it computes.
"""

from math import prod

from rftmega.backends.decoder.gathered_groups import Groups, Shape
from rftmega.run.planning.models import ADAM, GRADIENTS, MAIN_PARAMETERS, PARAMETERS, PlannedModel

OF_A_LINEAR = 2  # dimensions of a pair's matrices; pairs of experts have one more
FLOAT = 4  # bytes of a sharded weight, gradient and each moment, whatever the forward dtype


def shards_of(planned: PlannedModel, world: int) -> int:
    """Returns the number of blocks into which the rows of a (tensor-parallel) parameter are
    sharded. `world`: number of trainer processes.
    """
    return world // planned.parallel.replicas // planned.parallel.tensor


def elements_of(groups: Groups, shards: int) -> int:
    """Returns the number of elements of the model's own parameters (without adapters) that one
    process allocates. `groups`: shapes of the parameters; `shards`: see `shards_of`.
    """
    return sum(_rows(shapes, shards) for shapes in (*groups.apart, groups.whole_pass))


def pairs_of(groups: Groups, shards: int) -> int:
    """Returns the number of elements of adapters that one process allocates; arguments as of
    `elements_of`.
    """
    return sum(_rows(shapes, shards) for shapes in groups.pairs)


def trained_of(groups: Groups, shards: int) -> int:
    """Returns the number of elements of trained parameters that one process allocates; arguments as
    of `elements_of`.
    """
    if not groups.pairs:
        return elements_of(groups, shards)
    return pairs_of(groups, shards) + _rows(groups.beside, shards)


def _rows(shapes: tuple[Shape, ...], shards: int) -> int:
    return sum(-(-shape[0] // shards) * prod(shape[1:]) for shape in shapes)


def states(planned: PlannedModel, world: int) -> dict[str, int]:
    """Returns how many bytes of parameters, gradients, main parameters and Adam states one process
    holds, by kind: on the device or, with `cpu_offload`, on the host.

    Gradients are counted as before an optimizer step, Adam's moments as after the first one.
    """
    assert planned.groups is not None
    groups, shards = planned.groups, shards_of(planned, world)
    held = trained_of(groups, shards)
    narrow = planned.itemsize if planned.itemsize < FLOAT else 0  # forward-dtype rows, for pushes
    learns = planned.optimizer is not None
    return {
        PARAMETERS: frozen_bytes(planned, world) + (FLOAT + narrow) * held,
        GRADIENTS: FLOAT * held * learns,
        MAIN_PARAMETERS: 0,
        ADAM: 2 * FLOAT * held * learns,
    }


def frozen_bytes(planned: PlannedModel, world: int) -> int:
    """Returns the bytes on one process of a frozen model's shards, and of the whole matrix A of
    every adapter (A, B), which merging needs; 0 for a model without adapters.

    For an adapter of an embedding, the whole B is needed, too. Adapters of experts are sharded like
    the experts, and merged locally.
    """
    groups = planned.groups
    if groups is None or not groups.pairs:
        return 0
    shards = shards_of(planned, world)
    frozen = elements_of(groups, shards) - _rows(groups.beside, shards)
    matrices = [shape for shapes in groups.pairs for shape in shapes[::2]]
    whole = sum(prod(shape) for shape in matrices if len(shape) == OF_A_LINEAR)
    whole += sum(map(prod, groups.looked_up))
    return planned.itemsize * (frozen + whole)


def gathered(planned: PlannedModel, world: int, *, learns: bool) -> int:
    """Returns the peak bytes of whole (gathered) parameters and gradients on one process, with
    their communication buffers, in a forward pass or, if `learns`, in forward and backward passes.

    Per group of parameters: the received shards are in one buffer, which is kept until the next
    group has arrived, and is copied into the parameters. Gradients of the group are copied into
    another buffer, which is reduced while the next group computes.
    """
    assert planned.groups is not None
    groups, shards = planned.groups, shards_of(planned, world)
    wide = planned.itemsize
    pairs = [shards * _rows(shapes, shards) for shapes in groups.pairs]
    model = [shards * _rows(shapes, shards) for shapes in groups.apart]
    apart = [sum(both) for both in zip(model, pairs, strict=True)] if pairs else model
    gradients = [*pairs[:-1], pairs[-1] + shards * _rows(groups.beside, shards)] if pairs else apart
    always = shards * _rows(groups.whole_pass, shards)
    buffers = apart if shards > 1 else [0] * len(apart)
    # the output weight's gradient is counted with log-probs
    grown = [*gradients[:-1], gradients[-1] if planned.value else 0]
    zero3 = planned.parallel.reshard_after_forward
    at_once = [0 if zero3 else sum(apart) - size for size in apart]
    last = len(apart) - 1
    peaks: list[float] = []
    for number, size in enumerate(apart):
        before = max(0, number - 1)
        arriving = buffers[before] * (before != number) + buffers[number]
        peaks.append(wide * (arriving + size + at_once[number]))
        if not learns:
            continue
        ahead = buffers[before] * (zero3 and before != number)
        behind = FLOAT * gradients[number + 1] if number < last else 0
        computing = size + behind / wide
        leaving = FLOAT * gradients[number] / wide
        peaks.append(wide * (ahead + grown[number] + at_once[number] + max(computing, leaving)))
    whole = wide * always * (2 if learns and not pairs else 1)
    return int(max(peaks) + whole)
