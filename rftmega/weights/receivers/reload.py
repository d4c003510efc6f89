"""Additions to vLLM's layerwise weight reload: repacks modules that the reload leaves out, and
substitutes our parameter loaders.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
    make_online_process_loader,
)
from vllm.platforms import current_platform


def pack_output_heads(model: Any) -> None:
    """Runs vLLM's after-loading hook again for LM heads. An LM head tied to the embedding gets no
    weights in a reload, and on CPU it would keep multiplying with the old packed copy.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def with_head_bias(
    model: Any, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a reload; makes the reload keep an LM head's bias.

    vLLM's Transformers classes create that bias when it is loaded, not when the model is built. A
    first reload would drop it, because the head had no bias before, and generation would fail.
    """
    for name, tensor in tensors:
        if name.endswith("lm_head.bias"):
            for module in model.modules():
                if isinstance(module, ParallelLMHead) and module.bias is None:
                    _add_bias(module)
        yield name, tensor


def _add_bias(head: Any) -> None:
    """Gives an LM head a bias of zeros, which the running reload will fill in place."""
    kept = get_layerwise_info(head).kernel_tensors
    with _device_of(head):
        head._register_bias()
    head.bias.data.zero_()
    if kept is not None:  # the head's weight is still to come
        kept[0]["bias"] = head.bias


def _device_of(head: Any) -> torch.device:
    """Returns the device of an LM head, whose weight is on the meta device during a reload."""
    kept = get_layerwise_info(head).kernel_tensors
    weight: Tensor = kept[0]["weight"] if kept is not None else head.weight
    return weight.device


def name_loaders(model: Any) -> None:
    """Gives parameter loaders that are partial functions the name of their function: vLLM's reload
    asks every loader for its name, and would end with an AttributeError (MiniMax-M2).
    """
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial) and not hasattr(loader, "__name__"):
            vars(loader)["__name__"] = loader.func.__name__


def forget_expert_kernels(model: Any) -> None:
    """Drops the experts' CPU kernels, so that vLLM packs the new weights. vLLM packs experts'
    weights only when it creates the kernel at the first load; after a reload, the old kernel would
    silently misread the unpacked weights.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and current_platform.is_cpu():
            method.moe_kernel = None


class ParameterSource(Protocol):
    """ParameterSource is an object that fills a parameter in its method `into`; it is passed to a
    parameter loader in place of a tensor.
    """

    def into(self, parameter: Tensor) -> None: ...


def _fill(param: Tensor, filling: ParameterSource) -> None:
    """Fills `param` from `filling`. This is a parameter loader; vLLM recognises a parameter loader
    by its argument names.
    """
    filling.into(param)


class FreshParameters:
    """FreshParameters gives access to the parameters that vLLM's reload has put on the meta device,
    and replaces their loaders.

    The reload calls a parameter's loader twice: with the meta parameter, to count its elements, and
    once a layer is complete, with the parameter that the reload has allocated, which it then
    repacks into the engine's own parameter. Our loaders are called the same way and write only to
    the parameter that they are given. `release` restores the original loaders.
    """

    def __init__(self, model: Module):
        self._layers = dict(model.named_modules())
        self._filled: dict[str, Any] = {}  # by parameter, the reload's loader around ours
        self._before: list[tuple[Any, Any]] = []

    def bare(self) -> dict[str, Tensor]:
        """Returns the meta parameters by name, with their original loaders: the reload does not
        count loads through these, and so keeps the engine's weights.
        """
        for layer in self._layers.values():
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                # including biases, which are never on the meta device
                if tensor is not None and hasattr(tensor, "weight_loader"):
                    self._give(tensor, _get_original_loader(tensor))
        return {name: parameter for name, _, _, parameter in self._fresh()}

    def watch(self, names: Collection[str], filled: Callable[[str, Tensor], None]) -> None:
        """Calls `filled(name, parameter)` for each parameter in `names` after the last call of its
        loader.
        """
        for name, layer, attribute, parameter in self._fresh():
            if name in names:
                self._give(parameter, _watched(_get_original_loader(parameter), name, filled))
                parameter.weight_loader = make_online_process_loader(layer, attribute)

    def fill(self, name: str, filling: ParameterSource) -> None:
        """Loads parameter `name` from `filling`, an object that writes the parameter's elements,
        instead of from tensors.
        """
        layer_name, _, attribute = name.rpartition(".")
        layer = self._layers[layer_name]
        parameter: Any = layer._parameters[attribute]
        self._give(parameter, _fill)
        if name not in self._filled:
            self._filled[name] = make_online_process_loader(layer, attribute)
        parameter.weight_loader = self._filled[name]
        parameter.weight_loader(parameter, filling)

    def release(self) -> None:
        """Restores the original loaders. Call it at the end of a load, also after a failure."""
        while self._before:
            parameter, loader = self._before.pop()
            parameter.weight_loader = loader

    def _give(self, parameter: Any, loader: Any) -> None:
        self._before.append((parameter, parameter.weight_loader))
        parameter.weight_loader = loader

    def _fresh(self) -> Iterator[tuple[str, Module, str, Any]]:
        for layer_name, layer in self._layers.items():
            for attribute, parameter in layer._parameters.items():
                if parameter is not None and parameter.is_meta:
                    yield f"{layer_name}.{attribute}", layer, attribute, parameter


def _watched(loader: Any, name: str, filled: Callable[[str, Tensor], None]) -> Any:
    counted = 0

    @wraps(loader)
    def watched(param: Tensor, *given: Any, **named: Any) -> Any:
        nonlocal counted
        result = loader(param, *given, **named)
        counted += 1 if param.is_meta else -1
        if counted == 0:
            filled(name, param)
        return result

    return watched
