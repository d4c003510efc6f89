"""Tensors with Hugging Face shapes whose elements are fetched only when they are copied.

An engine's loader narrows, slices and chunks its input and copies the result into its parameters.
Lazy tensors either record which elements the loader reads, or fetch only these elements, so the
whole tensor never exists on this process.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rftmega.core.errors import EngineError
from rftmega.core.shards import Box, intersection, narrowed, within, without

Fetch = Callable[[Box, Tensor], None]


class LazyTensor(Tensor):
    """LazyTensor is a tensor without elements. View operations return lazy views; every other
    operation first fetches the elements: `fetch(box, out)` must write the elements of a block (box)
    to `out`, which has the block's shape and any dtype.
    """

    fetch: Fetch
    whole: torch.Size
    home: torch.device

    @staticmethod
    def of(
        shape: tuple[int, ...], dtype: torch.dtype, fetch: Fetch, home: torch.device
    ) -> "LazyTensor":
        """Creates a lazy tensor of the given shape and dtype. `fetch(box, out)`: function that
        writes the elements of a block (box) to `out`; `home`: device for elements that a
        computation needs.
        """
        return _like(torch.empty(shape, dtype=dtype, device="meta"), fetch, torch.Size(shape), home)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.copy_ and isinstance(args[1], LazyTensor):
                return _copied(args[0], args[1])
            if isinstance(args[0], LazyTensor) and func is not Tensor.copy_:
                try:
                    found = func(*args, **kwargs)
                except (RuntimeError, NotImplementedError):  # the operation needs elements
                    found = None
                if found is not None and (views := _as_views(found, args[0])) is not None:
                    return views
            return func(
                *[_filled(arg) for arg in args],
                **{name: _filled(arg) for name, arg in kwargs.items()},
            )


def elements_of(tensor: Tensor) -> Tensor:
    """Returns all elements of a lazy tensor as a plain tensor; returns any
    other tensor unchanged.
    """
    return _elements(tensor) if isinstance(tensor, LazyTensor) else tensor


def _like(plain: Tensor, fetch: Fetch, whole: torch.Size, home: torch.device) -> LazyTensor:
    tensor = plain.as_subclass(LazyTensor)
    tensor.fetch, tensor.whole, tensor.home = fetch, whole, home
    return tensor


def _as_views(found: Any, origin: LazyTensor) -> Any:
    """Returns `found`, the result of an operation on `origin`, with its tensors turned into lazy
    views of `origin`; a result without tensors is returned unchanged. Returns None if a tensor in
    `found` is no view of `origin`.
    """
    if isinstance(found, Tensor):
        same = (
            found.untyped_storage()._cdata == origin.untyped_storage()._cdata
            and found.dtype == origin.dtype
        )
        return _like(found, origin.fetch, origin.whole, origin.home) if same else None
    if isinstance(found, tuple | list) and any(isinstance(each, Tensor) for each in found):
        views = [_as_views(each, origin) for each in found]
        return None if any(view is None for view in views) else type(found)(views)
    return found


def _filled(argument: Any) -> Any:
    """Returns the argument with each lazy tensor, also within a list or tuple, replaced by its
    elements.
    """
    if isinstance(argument, LazyTensor):
        return _elements(argument)
    if isinstance(argument, tuple | list):
        return type(argument)(_filled(each) for each in argument)
    return argument


def _copied(target: Tensor, view: LazyTensor) -> Tensor:
    # vLLM also runs its loader on meta parameters, to count the elements it will copy
    if target.is_meta:
        return target.copy_(torch.empty(view.shape, dtype=view.dtype, device="meta"))
    box = _box(view)
    if box is None or target.shape != view.shape:
        return target.copy_(_elements(view))
    if view.numel():
        view.fetch(box, target)
    return target


def _elements(view: LazyTensor) -> Tensor:
    box = _box(view)
    if box is not None:
        elements = torch.empty(view.shape, dtype=view.dtype, device=view.home)
        if view.numel():
            view.fetch(box, elements)
        return elements
    everything = torch.empty(view.whole, dtype=view.dtype, device=view.home)
    view.fetch(tuple((0, size) for size in view.whole), everything)
    return everything.as_strided(view.shape, view.stride(), view.storage_offset())


def _box(view: LazyTensor) -> Box | None:
    return box_of(view.whole, view)


def box_of(whole: Sequence[int], view: Tensor) -> Box | None:
    """Returns the block (box), i.e. the index range along each dimension, that `view` covers of a
    contiguous tensor of shape `whole`; None if the view covers no block (e.g. transposed, or with
    another number of dimensions).
    """
    return _box_of(
        tuple(whole), tuple(view.shape), tuple(view.stride()), int(view.storage_offset())
    )


@lru_cache(maxsize=4096)  # MoE experts ask for the same boxes of equal shapes
def _box_of(
    whole: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Box | None:
    if len(shape) != len(whole):
        return None
    natural = [math.prod(max(1, size) for size in whole[dim + 1 :]) for dim in range(len(whole))]
    if any(
        size > 1 and stride != own
        for size, stride, own in zip(shape, strides, natural, strict=True)
    ):
        return None
    box = []
    for size, length, stride in zip(shape, whole, natural, strict=True):
        start, offset = divmod(offset, stride)
        if start + size > length:
            return None
        box.append((start, start + size))
    return tuple(box)


def reader(name: str, pieces: Sequence[tuple[Box, Tensor]]) -> Fetch:
    """Returns a function `fetch(box, out)` that copies a block (box) of the tensor `name` from
    `pieces`: the blocks of the tensor on this process, with their elements.

    The returned function raises EngineError if `pieces` lack some of the elements.
    """

    def fetch(box: Box, out: Tensor) -> None:
        left = [box]
        for here, elements in pieces:
            common = intersection(here, box)
            if common is not None:
                target = narrowed(out, within(common, box))
                target.copy_(narrowed(elements, within(common, here)))
                left = [rest for each in left for rest in without(each, common)]
        if left:
            raise EngineError(
                f"The engine asks for {name}{list(left[0])}; it did not when the push was planned."
            )

    return fetch
