"""Maps the tensor names of a folder to parameters of a transformers model by transformers'
conversion mapping, for names that `transformers.named_as_in_a_folder` does not map.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from rftmega.converters import stacks_of
from rftmega.core.json_files import read_json_object
from rftmega.core.shards import Box, shape_of, whole
from rftmega.models.hf.hf_folder import HFFolder

EXPERT = re.compile(r"\.experts\.(\d+)\.")


def converted_name(
    name: str,
    renamings: list[WeightRenaming],
    converters: list[WeightConverter],
    prefix: str,
    known: dict[str, Any],
) -> tuple[str, str | None]:
    """Returns the parameter that a folder's tensor is (part of), and the pattern of the converter
    that changes the tensor; `known`: the model's own names.

    A name that is a parameter's own name is not renamed if the new name would be no parameter's.
    transformers loads the folder in the same way.
    """
    found: tuple[str, str | None] = rename_source_key(name, renamings, converters, prefix, known)
    if found[0] not in known and name in known:
        found = rename_source_key(name, [], [], prefix, known)
    return found


def divided_among(
    model: PreTrainedModel, target: str, converter: WeightConverter, shape: tuple[int, ...]
) -> dict[str, Box]:
    """Returns parameter name -> block of a folder's tensor of this shape, which `converter` divides
    along one dimension; {} if it does something else. `target`: the first of these parameters.
    """
    (operation, *more) = converter.operations
    if more or not isinstance(operation, Chunk):
        return {}
    patterns = operation.get_target_patterns(converter.target_patterns, config=model.config)
    stem, found, end = target.rpartition(converter.target_patterns[0])
    if not found or not 0 <= operation.dim < len(shape):
        return {}
    size, dim = -(-shape[operation.dim] // len(patterns)), operation.dim
    boxes = {}
    for number, each in enumerate(patterns):
        start, stop = (min(place * size, shape[dim]) for place in (number, number + 1))
        box = whole(shape)
        boxes[stem + each + end] = (*box[:dim], (start, stop), *box[dim + 1 :])
    return boxes


class ConvertedNames:
    """ConvertedNames maps the tensors of a folder to views of a model's parameters."""

    def __init__(self, model: PreTrainedModel, folder: str | Path):
        """`folder`: the shapes of its tensors tell where tensors of several sizes lie in a
        parameter.
        """
        self._folder, self._model = folder, model
        kept = model.state_dict().keys()
        # without duplicates: a tied LM head is the embedding
        named = [*model.named_parameters(), *model.named_buffers()]
        self._state = {name: tensor.detach() for name, tensor in named if name in kept}
        transforms = get_model_conversion_mapping(model)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._of_pattern = {
            pattern: each for each in self._converters for pattern in each.source_patterns
        }
        self._prefix = model.base_model_prefix
        self._stacked = self._places(read_json_object(Path(folder) / "config.json"))

    def places_of(self, name: str, shape: tuple[int, ...]) -> list[tuple[Tensor, Box]]:
        """Returns the views of model parameters that blocks (boxes) of the folder's tensor `name`,
        of shape `shape`, correspond to; [] if there are none.
        """
        target, pattern = self._renamed(name)
        if pattern is not None:
            divided = divided_among(self._model, target, self._of_pattern[pattern], shape)
            if divided and self._state.keys() >= divided.keys():
                places = [(self._state[each], box) for each, box in divided.items()]
                fits = all(view.shape == shape_of(box) for view, box in places)
                return places if fits else []
        view = self.place_of(name, shape)
        return [] if view is None else [(view, whole(shape))]

    def place_of(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Returns the view of a model parameter that corresponds to the folder's tensor `name` of
        shape `shape`; None if no parameter has such a view.
        """
        target, pattern = self._renamed(name)
        if (found := self._state.get(target)) is None:
            stacked = self._stacked.get(name)
            return stacked if stacked is not None and stacked.shape == shape else None
        place = found if pattern is None else self._within(found, name, pattern, shape)
        return place if place is not None and place.shape == shape else None

    def _places(self, hf_config: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the views of parameters that stack matrices or biases of all experts, by the
        names that these have in the architecture's conversion table.
        """
        return {
            name: place.of(stacked[place.expert])
            for stack in stacks_of(hf_config)
            if (stacked := self._state.get(stack.name)) is not None
            and stacked.shape == stack.published
            for name, place in stack.places(transposed=True)
        }

    def _within(
        self, parameter: Tensor, name: str, pattern: str, shape: tuple[int, ...]
    ) -> Tensor | None:
        converter = self._of_pattern[pattern]
        place, merged = parameter, 0
        for operation in converter.operations:
            if isinstance(operation, MergeModulelist) and operation.dim == 0:
                expert = EXPERT.search(name)
                if expert is None or int(expert[1]) >= len(parameter):
                    return None
                place, merged = parameter[int(expert[1])], 1
            elif isinstance(operation, Concatenate):
                axis = operation.dim - merged
                first = self._begin(name, pattern, converter, place.shape[axis], shape, axis)
                if first + shape[axis] > place.shape[axis]:
                    return None
                place = place.narrow(axis, first, shape[axis])
            else:
                return None
        return place

    def _begin(
        self,
        name: str,
        pattern: str,
        converter: WeightConverter,
        size: int,
        shape: tuple[int, ...],
        axis: int,
    ) -> int:
        """Returns where a tensor begins along `axis` of the parameter, of size `size`, that consists
        of tensors of all source patterns of `converter`.
        """
        order = converter.source_patterns.index(pattern)
        if size == len(converter.source_patterns) * shape[axis]:
            return order * shape[axis]
        target = self._target_of(name)
        files = HFFolder(self._folder)
        sizes = {
            patterns: files.shape_of(other)[axis]
            for other in files.names
            if self._target_of(other) == target
            and (patterns := self._pattern_of(other)) is not None
        }
        return sum(sizes.get(each, size) for each in converter.source_patterns[:order])

    def _target_of(self, name: str) -> str:
        return str(self._renamed(name)[0])

    def _pattern_of(self, name: str) -> str | None:
        return self._renamed(name)[1]

    def _renamed(self, name: str) -> tuple[str, str | None]:
        return converted_name(name, self._renamings, self._converters, self._prefix, self._state)
