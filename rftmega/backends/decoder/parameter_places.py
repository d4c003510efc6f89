"""Finds the positions of Hugging Face tensors in the parameters of a transformers model.

Most parameters have the same name as in the folder. Where transformers fuses tensors (experts into
one three-dimensional tensor, gate and up into one), its conversion mapping defines the block (box)
of each tensor in the parameter. Where it divides a tensor (queries, keys and values in one), the
mapping defines the block of the tensor that each parameter is. Tensors that do not become blocks
(transposed, interleaved) raise CheckpointError.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
)

from rftmega.backends.decoder.tensor_plan import Split
from rftmega.converters import NOT_WEIGHTS
from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import read_json_object
from rftmega.core.shards import (
    Box,
    LogicalTensor,
    Shard,
    ShardPart,
    disjoint,
    intersection,
    shape_of,
    volume,
    whole,
    within,
)
from rftmega.model_providers.backend_support import advice
from rftmega.models.hf.converted_names import converted_name, divided_among
from rftmega.models.hf.hf_folder import HFFolder

LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Placed:
    """Placed is the position of a Hugging Face folder's tensor within a parameter of the
    transformers model, into which several such tensors may be fused.
    """

    name: str  # of the HF tensor
    shape: tuple[int, ...]
    expert: int | None  # index in the parameter's first dimension; None: no such dimension
    offset: tuple[int, ...]  # in the parameter, or in the expert's slice
    piece: Box | None = None  # of the tensor, which is divided among parameters; None: all of it

    @property
    def box(self) -> Box:
        """Returns the block (box) that the tensor occupies, in the parameter or, if `expert` is
        set, in that expert's slice.
        """
        sizes = self.shape if self.piece is None else shape_of(self.piece)
        return tuple((at, at + size) for at, size in zip(self.offset, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """ShardPlan maps this process's rows of a parameter to blocks of Hugging Face tensors; it
    applies to any tensor of the rows' shape, such as the weight or an Adam moment.
    """

    logical: LogicalTensor
    parts: tuple[ShardPart, ...]
    index: int | None  # of the expert among the rows; None: the rows themselves

    def of(self, rows: Tensor) -> Shard:
        """Returns the shard for `rows`: this process's rows of the weight, or of a tensor of the
        same shape such as an Adam moment.
        """
        held = rows if self.index is None else rows[self.index]
        return Shard(self.logical, self.parts, held)


def places_of(
    model: PreTrainedModel,
    wanted: Mapping[str, tuple[int, ...]],
    files: HFFolder,
    *,
    allowed: Iterable[str],
) -> dict[str, list[Placed]]:
    """Returns parameter name -> positions of its Hugging Face tensors, for the parameters in
    `wanted` (name -> shape).

    Each tensor of the model folder `files` must belong to a wanted parameter, be in `allowed`
    (names of tensors that may stay unread), or be ignored by transformers. Raises CheckpointError
    for any other tensor, for an incomplete parameter, and for a tensor that does not become a block
    of its parameter.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    known: dict[str, Any] = dict(wanted)
    prefix = model.base_model_prefix
    found: dict[str, list[Placed]] = defaultdict(list)
    fused: dict[str, list[Fused]] = defaultdict(list)
    members: Counter[tuple[str, str]] = Counter()
    strangers = []
    for name in sorted(files.names, key=dot_natural_key):
        target, pattern = converted_name(name, renamings, converters, prefix, known)
        if target not in wanted:
            strangers.append(name)
            continue
        shape = files.shape_of(name)
        if pattern is None:
            found[target].append(Placed(name, shape, None, (0,) * len(shape)))
            continue
        converter = converter_of[pattern]
        divided = divided_among(model, target, converter, shape)
        if divided and wanted.keys() >= divided.keys():
            for each, piece in divided.items():
                found[each].append(Placed(name, shape, None, (0,) * len(shape), piece))
            continue
        number = members[target, pattern]
        members[target, pattern] += 1
        fused[target].append(_fused(files, name, shape, converter, pattern, number))
    for target, parts in fused.items():
        found[target] += _beside_each_other(parts)
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ())]
    strangers = [
        name
        for name in strangers
        if name not in set(allowed)
        and not re.fullmatch(NOT_WEIGHTS, name)
        and not any(re.search(each, name) for each in ignored)
    ]
    if strangers:
        raise CheckpointError(
            f"{files.folder} holds {len(strangers)} tensor(s) that {type(model).__name__} has no parameter for, "
            f"{strangers[0]!r} first. Weights that nobody reads would make it another model."
        )
    for name, shape in wanted.items():
        _refuse_incomplete(files, name, shape, found.get(name, []))
    return dict(found)


class Fused(NamedTuple):
    """Fused is a folder's tensor that becomes a part of a fused parameter."""

    place: Placed  # with offset 0
    axis: int  # along which it stands beside others
    order: int  # its place among them


def _beside_each_other(parts: Sequence[Fused]) -> list[Placed]:
    """Returns the positions of the tensors that a parameter, or each expert in it, consists of."""
    found = []
    filled: Counter[int | None] = Counter()
    for place, axis, _ in sorted(parts, key=lambda part: part.order):
        offset = [0] * len(place.shape)
        offset[axis] = filled[place.expert]
        filled[place.expert] += place.shape[axis]
        found.append(replace(place, offset=tuple(offset)))
    return found


def _fused(
    files: HFFolder,
    name: str,
    shape: tuple[int, ...],
    converter: WeightConverter,
    pattern: str,
    number: int,
) -> Fused:
    """Returns the `number`-th tensor (`name`, `shape`) of the folder that matches `pattern`, a source
    pattern of `converter`, as a part of a fused parameter.
    """
    merged, joined = False, 0
    for operation in converter.operations:
        if isinstance(operation, MergeModulelist) and operation.dim == 0:
            merged = True
        elif isinstance(operation, Concatenate):
            joined = operation.dim
        else:
            fields = read_json_object(Path(files.folder) / "config.json")
            raise CheckpointError(
                f"{files.folder}: transformers makes {name} of model_type={fields.get('model_type')} another tensor by "
                f"{type(operation).__name__}, which has no place in this backend: weights are pushed and saved as they are in "
                "the folder. "
                + advice(
                    fields, "Save the folder with save_pretrained(..., save_original_format=False)"
                )
            )
    axis = joined - 1 if merged else joined
    order = converter.source_patterns.index(pattern)
    place = Placed(name, shape, number if merged else None, (0,) * len(shape))
    return Fused(place, max(axis, 0), order)


def _refuse_incomplete(
    files: HFFolder, name: str, shape: tuple[int, ...], places: Sequence[Placed]
) -> None:
    if not places:
        raise CheckpointError(f"{files.folder} holds no {name}. The folder is incomplete.")
    elements = sum(volume(place.box) for place in places)
    slices = {place.expert for place in places}
    inner = shape if slices == {None} else shape[1:]
    fits = all(
        intersection(place.box, tuple((0, n) for n in inner)) == place.box for place in places
    )
    boxes: dict[int | None, list[Box]] = defaultdict(list)
    for place in places:
        boxes[place.expert].append(place.box)
    covered = sum(volume(box) for own in boxes.values() for box in disjoint(own))
    if elements != torch.Size(shape).numel() or covered != elements or not fits:
        tensors = ", ".join(f"{place.name} {list(place.shape)}" for place in places[:3])
        raise CheckpointError(
            f"{files.folder}: {name} is {list(shape)} by config.json, and the folder has {tensors}"
            f"{', ...' if len(places) > 3 else ''}. One of them is wrong."
        )


def plans_of(
    parameter: str,
    places: Sequence[Placed],
    rows: tuple[int, int],
    dtype: torch.dtype,
    *,
    split: Split | None = None,
    opens: bool,
) -> list[ShardPlan]:
    """Returns the ShardPlans of rows start ... stop - 1 (`rows`) of the parameter named `parameter`
    or, with `split`, of a process's tensor-parallel share of it.

    `places`: positions of HF tensors in the parameter. `dtype`: that of the weights in the forward
    pass. `opens`: the parameter precedes the layers, as the embedding does. HF tensors without
    elements in these rows have no plan.
    """
    start, stop = rows
    found_layer = LAYER.search(parameter)
    layer = int(found_layer[1]) if found_layer else None
    found = []
    together: dict[int | None, list[Placed]] = defaultdict(list)
    for place in places:
        together[place.expert].append(place)
    for expert, group in together.items():
        logical = LogicalTensor(
            tuple(place.name for place in group),
            tuple(place.shape for place in group),
            dtype,
            layer=layer,
            expert=expert,
            kind=LAYER.sub(".layers.*.", parameter),
            opens=opens,
        )
        if expert is None:
            parts = tuple(_parts(group, rows, split))
            index = None
        else:
            here = start <= expert < stop
            inner = None if split is None else replace(split, dim=split.dim - 1)
            parts = tuple(_parts(group, None, inner)) if here else ()
            index = expert - start
        if parts:
            found.append(ShardPlan(logical, parts, index))
    return found


def buffer_dtype(files: HFFolder, name: str, buffer: Tensor) -> torch.dtype:
    """Returns the dtype in which a buffer is pushed and saved. A floating-point buffer keeps its
    dtype. A buffer of whole numbers gets the dtype of the folder's tensor `name`, so that an export
    equals the folder.
    """
    return buffer.dtype if buffer.is_floating_point() else files.dtype_of(name, integers=True)


def plan_of_buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> ShardPlan:
    """Returns the ShardPlan of a whole buffer, which is a Hugging Face tensor of the same name."""
    layer = LAYER.search(name)
    logical = LogicalTensor(
        (name,),
        (shape,),
        dtype,
        layer=int(layer[1]) if layer else None,
        kind=LAYER.sub(".layers.*.", name),
    )
    return ShardPlan(logical, (ShardPart(0, whole(shape), (0,) * len(shape)),), None)


def _parts(
    group: Sequence[Placed], rows: tuple[int, int] | None, split: Split | None
) -> Iterable[ShardPart]:
    """Yields the blocks of the Hugging Face tensors in `group` (those of one parameter, or of one
    expert in it) that lie in rows start ... stop - 1 (`rows`; None: all rows) of the
    tensor-parallel share `split` (None: the whole parameter).
    """
    for number, place in enumerate(group):
        own = place.box
        for shared, moved in _shared(own, split):
            here = shared if rows is None else (rows, *shared[1:])
            common = intersection(shared, here)
            if common is None:
                continue
            offset = [low for low, _ in common]
            offset[0] -= rows[0] if rows is not None else 0
            box = within(_moved(common, moved), own)
            if place.piece is not None:
                box = _moved(box, [start for start, _ in place.piece])
            yield ShardPart(number, box, tuple(offset))


def _shared(own: Box, split: Split | None) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yields the parts of the block `own` (start and stop along each dimension of a parameter) that
    lie in the tensor-parallel share `split`, in the share's coordinates, each with the offset that
    leads back to the coordinates of the whole parameter.
    """
    if split is None:
        yield own, (0,) * len(own)
        return
    filled, dim = 0, split.dim
    for start, stop in split.slices:
        common = intersection(own, (*own[:dim], (start, stop), *own[dim + 1 :]))
        away = (*(0,) * dim, start - filled, *(0,) * (len(own) - dim - 1))
        if common is not None:
            yield _moved(common, tuple(-each for each in away)), away
        filled += stop - start


def _moved(box: Box, away: Sequence[int]) -> Box:
    return tuple((low + by, high + by) for (low, high), by in zip(box, away, strict=True))


@torch.no_grad()
def read(files: HFFolder, shards: Iterable[Shard]) -> int:
    """Fills shards, this process's tensors with their blocks of Hugging Face tensors, from the
    folder `files`, reading only these blocks; returns the number of bytes read.
    """
    read_bytes = 0
    for shard in shards:
        for number, (name, shape) in enumerate(
            zip(shard.logical.names, shard.logical.shapes, strict=True)
        ):
            integers = not shard.logical.dtype.is_floating_point
            source = files.slice_of(name, shape, integers=integers)
            for box, elements in shard.views(number):
                piece = source[tuple(slice(low, high) for low, high in box)]
                read_bytes += piece.nbytes
                elements.copy_(piece)
    return read_bytes


@torch.no_grad()
def differs_from(files: HFFolder, name: str, shards: Iterable[Shard]) -> bool:
    """Returns whether this process's blocks of tensor `name` in `shards` differ from that tensor in
    the folder `files`; False if the folder does not have it.
    """
    if name not in files:
        return False
    for shard in shards:
        source = files.slice_of(name, shard.logical.shapes[0])
        for box, elements in shard.views(0):
            piece = source[tuple(slice(low, high) for low, high in box)]
            if not torch.equal(piece.to(elements.dtype), elements):
                return True
    return False
