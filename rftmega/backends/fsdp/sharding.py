"""Shards a network's parameters over the processes with torch's FSDP2, layer by layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rftmega.backends.decoder.meta_decoder import gathered_apart
from rftmega.backends.fsdp.mesh import ShardingMesh
from rftmega.backends.fsdp.module import Network
from rftmega.config import ParallelConfig
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.backend_support import advice
from rftmega.runtime import device


def shard_parameters(
    network: Network,
    model: PreTrainedModel,
    placement: ShardingMesh,
    parallel: ParallelConfig,
    dtype: torch.dtype,
) -> None:
    """Shards the rows of every parameter of a network, in place; the network may be on the meta
    device.
    `dtype` is that of the forward and backward pass. Main parameters and gradient reduction stay in
    float32. `meta_decoder.gathered_apart` defines the parameter groups.
    """
    narrow = dtype != torch.float32
    precision = MixedPrecisionPolicy(
        param_dtype=dtype if narrow else None, reduce_dtype=torch.float32 if narrow else None
    )
    on_cuda = device.current().type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_cuda) if parallel.cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": placement.mesh,
        "mp_policy": precision,
        "offload_policy": offload,
        "reshard_after_forward": parallel.reshard_after_forward,
    }
    for each in gathered_apart(model, network.head):
        fully_shard(each, **options)
    fully_shard(network, **options)
    for module in sharded_modules(network):
        # Gradients are sums over the processes, not means: one global count divides them.
        module.set_gradient_divide_factor(1.0)
        # otherwise the reduction includes a multiplication, which gloo does not support
        module.set_force_sum_reduction_for_comms(True)


def sharded_modules(network: nn.Module) -> Iterator[FSDPModule]:
    """Yields the modules of the network that FSDP2 manages: each gathers its parameters together."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            yield module


def materialise(network: nn.Module, model: PreTrainedModel, where: torch.device) -> None:
    """Allocates memory on device `where` for a sharded network on the meta device.

    Parameters are left uninitialised. transformers recomputes buffers that checkpoints don't
    contain, such as RoPE frequencies. Raises CheckpointError for a buffer that transformers does
    not recompute.
    """
    network._apply(lambda x: torch.empty_like(x, device=where) if x.is_meta else x.to(where))
    model.tie_weights()
    sharded = {name: isinstance(each, DTensor) for name, each in network.named_parameters()}
    anew = [name for name, is_sharded in sharded.items() if not is_sharded]
    if any(sharded.values()) and anew:
        raise _tied_elsewhere(model, anew[0])
    _recompute_buffers(model)
    for group in sharded_modules(network):
        # allocates each parameter's final memory, padded to equal shards, before anybody refers to
        # it
        group.unshard()
        group.reshard()


def refuse_to_materialise(network: nn.Module, model: PreTrainedModel) -> None:
    """Raises CheckpointError, as `materialise` does, for a network on the meta device, which can't
    be used afterwards.
    """
    before: list[Tensor] = []  # kept, so that no other object gets their ids
    shards: dict[int, nn.Parameter] = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                before.append(parameter)
                shard = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
                module._parameters[name] = shards.setdefault(id(parameter), shard)
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers[name]) is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.tie_weights()
    own = set(map(id, shards.values()))
    if anew := [name for name, each in network.named_parameters() if id(each) not in own]:
        raise _tied_elsewhere(model, anew[0])
    _recompute_buffers(model)


def _tied_elsewhere(model: PreTrainedModel, name: str) -> CheckpointError:
    return CheckpointError(
        f"transformers ties {name} of {type(model).__name__} to a tensor of its own, which backend=fsdp can't shard. "
        + advice(model.config, "Take another model")
    )


def _recompute_buffers(model: PreTrainedModel) -> None:
    """Lets transformers recompute all buffers that checkpoints don't contain. Raises CheckpointError
    for a meta tensor that is neither parameter nor buffer, and for a buffer that transformers does
    not recompute.
    """
    for module in model.modules():
        for name, tensor in vars(module).items():
            if isinstance(tensor, Tensor) and tensor.is_meta:
                raise CheckpointError(
                    f"{type(module).__name__} of {type(model).__name__} keeps {name!r} as neither parameter nor buffer, so "
                    f"transformers does not make it anew. {advice(model.config, 'Take another model')}"
                )
    owners = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    # the innermost model of each module, whose class initialises it
    owner_of = {module: owner for owner in owners for module in owner.modules()}
    floats: dict[nn.Module, list[Tensor]] = {}
    for module in model.modules():
        buffers = [module._buffers[name] for name in module._non_persistent_buffers_set]
        floats[module] = [x for x in buffers if x is not None and x.is_floating_point()]
        for buffer in floats[module]:
            buffer.fill_(torch.nan)
        if buffers:
            _initialise(module, owner_of[module])

    def unknown() -> list[nn.Module]:
        return [module for module, held in floats.items() if any(x.isnan().any() for x in held)]

    for owner in owners if unknown() else []:  # some models write buffers of their layers
        _initialise(owner, owner)
    for module in unknown():
        raise CheckpointError(
            f"{type(module).__name__} of {type(model).__name__} has buffers {sorted(module._non_persistent_buffers_set)} that no "
            f"checkpoint has and that transformers does not make anew. {advice(model.config, 'Take another model')}"
        )


def _initialise(module: nn.Module, owner: PreTrainedModel) -> None:
    """Lets the class of `owner` initialise a module's buffers."""
    with _without_parameters(module):  # which are shards, and loaded later
        owner._init_weights(module)


@contextmanager
def _without_parameters(module: nn.Module) -> Iterator[None]:
    """Context manager in whose block the module's own parameters, and those of its parts, have no
    memory.
    """
    owners = [(each, dict(each._parameters)) for each in module.modules()]
    for each, held in owners:
        for name, parameter in held.items():
            if parameter is not None:
                shape = tuple(parameter.shape)
                each._parameters[name] = nn.Parameter(torch.empty(shape, device="meta"), False)
    try:
        yield
    finally:
        for each, held in owners:
            each._parameters.update(held)


def local(parameter: Tensor) -> Tensor:
    """Returns this process's rows of a sharded parameter, detached, without a copy."""
    assert isinstance(parameter, DTensor)
    held: Tensor = parameter._local_tensor.detach()
    return held
