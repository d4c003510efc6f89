"""Records which elements an engine's loader copies to which parameter, during one load of meta
tensors into meta parameters.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rftmega.core.shards import Box
from rftmega.weights.lazy_tensors import box_of


class Geometry(NamedTuple):
    """Geometry is the size, stride and offset of a view within its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Copy(NamedTuple):
    """Copy is an elementwise copy of a block (box) of the HF tensor `name` into a view of a
    parameter.
    """

    name: str
    box: Box
    target: Geometry


class LoadRecorder(TorchDispatchMode):
    """LoadRecorder is a dispatch mode that records a loader's copies. The loader gets the meta
    tensors that the method `tensor` creates, and fills parameters on the meta device.

    `asked` has, by HF name, the blocks (boxes) that the loader reads; `copies`, by parameter name,
    the blocks that the loader copies unchanged. `changed` has the names of parameters that are
    written in any other way, `worked_on` the names of HF tensors that are used in any other way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, list[Box]] = defaultdict(list)
        self.copies: dict[str, list[Copy]] = defaultdict(list)
        self.changed: set[str] = set()
        self.worked_on: set[str] = set()
        self._parameters: dict[int, str] = {}
        self._tensors: dict[int, tuple[str, Tensor]] = {}

    def parameters(self, named: Mapping[str, Tensor]) -> None:
        """Registers the meta parameters, by name, that the loader fills."""
        self._parameters = {_storage(parameter): name for name, parameter in named.items()}

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Creates a meta tensor with the name, dtype and shape of an HF tensor, to be passed to the
        loader.
        """
        made = torch.empty(shape, dtype=dtype, device="meta")
        self._tensors[_storage(made)] = name, made
        return made

    def forget(self) -> None:
        """Releases the meta tensors and parameters; the recorded copies stay."""
        self._tensors.clear()
        self._parameters.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: no code under this mode is compiled, and torch's guard against compilation
        would double the cost.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and _storage(args[1]) in self._tensors:
            self._copied(args[0], args[1])
            return args[0]
        if not func.is_view:
            given = list(_tensors(args, kwargs or {}))  # several may be views of one tensor
            for each in given:
                if _storage(each) in self._tensors:
                    self._read(each)
            if func._schema.is_mutable:
                storages = {_storage(each) for each in given}
                self.changed |= {
                    self._parameters[storage] for storage in storages & self._parameters.keys()
                }
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]  # into a parameter that is not registered, from a computed tensor
        return func(*args, **(kwargs or {}))

    def _copied(self, target: Tensor, view: Tensor) -> None:
        name, whole = self._tensors[_storage(view)]
        parameter = self._parameters.get(_storage(target))
        box = box_of(whole.shape, view)
        if parameter is None or target.shape != view.shape or box is None:
            self._read(view)
            self.changed |= {parameter} if parameter else set()
        elif view.numel():
            self.asked[name].append(box)
            geometry = Geometry(
                tuple(target.shape), tuple(target.stride()), int(target.storage_offset())
            )
            self.copies[parameter].append(Copy(name, box, geometry))

    def _read(self, tensor: Tensor) -> None:
        """Records that a computation reads `tensor`: the block (box) that it covers of an HF
        tensor, or the whole HF tensor if the view is no block.
        """
        name, whole = self._tensors[_storage(tensor)]
        self.worked_on.add(name)
        self.asked[name].append(
            box_of(whole.shape, tensor) or tuple((0, size) for size in whole.shape)
        )

    def plain(self) -> dict[str, list[Copy]]:
        """Returns the recorded copies that can be replayed, by parameter name: all copies to
        parameters that nothing else fills, from HF tensors that are used for nothing else.
        """
        changed, worked_on = set(self.changed), set(self.worked_on)
        while True:
            worked_on |= {
                copy.name for parameter in changed for copy in self.copies.get(parameter, [])
            }
            more = {
                name
                for name, copies in self.copies.items()
                if not worked_on.isdisjoint(copy.name for copy in copies)
            }
            if more <= changed:
                return {name: copies for name, copies in self.copies.items() if name not in changed}
            changed |= more


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors among an operator's arguments, also within lists and tuples."""
    for argument in (*args, *kwargs.values()):
        for each in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(each, Tensor):
                yield each


def _storage(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found
