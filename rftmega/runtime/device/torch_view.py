"""Runs unmodified megatron-core on a machine without CUDA.

megatron-core uses `torch.cuda` on some 500 lines. An import hook gives its modules a *view* of
torch, whose `.cuda` and factory functions use the CPU; the real torch module, user code and vLLM
are not affected. Each patch states what breaks without it, and
`tests/distributed/test_torch_view.py` switches each off in turn and expects that failure. Written
for megatron-core 0.16.1 (facts: shared spec `megatron_on_cpu.md`).
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

PATCHES = (
    "current_device",
    "literals",
    "streams",
    "rng",
    "tensor_type",
    "tensor_cuda",
    "split_sizes",
    "uneven",
)
_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
)
_installed = False


def install(*, without: frozenset[str] = frozenset()) -> bool:
    """Installs the import hook; returns False if nothing is to do, because CUDA is available or the
    hook is installed already.
    `without` names patches to leave out (tests only). Raises RuntimeError if megatron.core was
    imported before.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return False
    early = sorted(name for name in sys.modules if name.startswith("megatron.core"))
    if early:
        raise RuntimeError(
            f"{early[0]} was imported before rftmega; import rftmega (or model_providers) first."
        )
    assert without <= set(PATCHES), without - set(PATCHES)
    after_import = {
        module: patch
        for name, patches in _MODULE_PATCHES.items()
        if name not in without
        for module, patch in patches.items()
    }
    sys.meta_path.insert(0, _Finder(_view_of_torch(without), after_import))
    _installed = True
    return True


# --- the view
# -----------------------------------------------------------------------------------------------------------


class _Stream:
    """_Stream imitates a CUDA stream: a CPU executes in order, so all of a stream's work is always
    complete.
    """

    def __init__(self, *args: object, **kwargs: object): ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> object:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *args: object, **kwargs: object): ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _cuda_names(without: frozenset[str]) -> dict[str, Any]:
    stream = _Stream()
    groups: dict[str, dict[str, Any]] = {
        # layers.py, mappings.py, rotary embeddings: `device=torch.cuda.current_device()` raises
        # "not compiled with CUDA".
        "current_device": {"current_device": lambda: _CPU},
        # p2p_communication.py synchronises after every batched send and receive; the same
        # AssertionError under PP.
        "streams": {
            "synchronize": lambda device=None: None,
            "Stream": _Stream,
            "Event": _Event,
            "current_stream": lambda device=None: stream,
            "default_stream": lambda device=None: stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "set_stream": lambda stream: None,
        },
        # tensor_parallel/random.py saves, seeds and restores the device's generator; here that is
        # the CPU's own.
        "rng": {
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        },
    }
    return {
        key: value
        for group, names in groups.items()
        if group not in without
        for key, value in names.items()
    }


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        if device is not None:
            kwargs["device"] = _CPU if torch.device(device).type == "cuda" else device
        return factory(*args, **kwargs)  # pinning needs an accelerator

    return create


class _View(types.ModuleType):
    """_View is a substitute for the module `behind`: it defines the attributes `own`, and takes all
    other attributes from that module.
    """

    def __init__(self, behind: types.ModuleType, own: dict[str, Any]):
        super().__init__(behind.__name__)
        self.__dict__.update(own, _behind=behind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_behind"], name)


def _view_of_torch(without: frozenset[str]) -> types.ModuleType:
    own: dict[str, Any] = {"cuda": _View(torch.cuda, _cuda_names(without))}
    # schedules.py, optimizer.py, clip_grads.py: `device="cuda"` in factory calls
    if "literals" not in without:
        own |= {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _View(torch, own)


# --- patches of single modules
# -------------------------------------------------------------------------------------------


def _patch_rng(module: Any) -> None:
    """Replaces Megatron's `_set_cuda_rng_state`, which queues a lazy call that is never run on a
    CPU: Megatron's forked generators would silently share one random stream.
    """
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(
        new_state
    )
    # fork() warns if the CPU generator's state changed in a "device" context: here it always has.
    logging.getLogger(module.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


@contextlib.contextmanager
def _tensor_attribute(name: str, value: Any) -> Iterator[None]:
    real = getattr(torch.Tensor, name)
    setattr(torch.Tensor, name, value)
    try:
        yield
    finally:
        setattr(torch.Tensor, name, real)


def _claiming_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    completion = _real_type(self, *args, **kwargs)
    if args or kwargs or not completion.startswith("torch.") or "cuda" in completion:
        return completion
    return completion.replace("torch.", "torch.cuda.", 1)


_real_type = torch.Tensor.type


def _within(owner: Any, name: str, attribute: str, value: Any) -> None:
    """Wraps the function or class method called `name` of `owner` so that torch.Tensor.<attribute>
    is `value` while it runs.
    """
    raw = owner.__dict__[name]
    function = raw.__func__ if isinstance(raw, classmethod) else raw

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _tensor_attribute(attribute, value):
            return function(*args, **kwargs)

    setattr(owner, name, classmethod(wrapped) if isinstance(raw, classmethod) else wrapped)


def _patch_float16_optimizer(module: Any) -> None:
    """Makes parameters report a CUDA type: the optimizer groups them by `param.type()`, e.g.
    "torch.cuda.FloatTensor", and raises TypeError for other types.
    """
    _within(module.Float16OptimizerWithFloat16Params, "__init__", "type", _claiming_cuda)


def _patch_distributed_optimizer(module: Any) -> None:
    _within(
        module.DistributedOptimizer, "_build_model_and_main_param_groups", "type", _claiming_cuda
    )


def _patch_clip(module: Any) -> None:
    """Makes tensors report a CUDA type within `clip_grad_by_total_norm_fp32`, which asserts that
    they have one.
    """
    _within(module, "clip_grad_by_total_norm_fp32", "type", _claiming_cuda)


def _patch_tied_embeddings(module: Any) -> None:
    """Makes `weight.data.cuda()` return the CPU tensor: Megatron calls it to synchronise tied
    embeddings between the first and last pipeline stage.
    """
    _within(
        module.LanguageModule,
        "setup_embeddings_and_output_layer",
        "cuda",
        lambda self, *args, **kwargs: self,
    )


def _patch_context_slices(module: Any) -> None:
    """Makes `torch.tensor(...).cuda()` return the CPU tensor: context parallelism calls it to
    select the positions that this rank holds of sequences that are not packed.
    """
    _within(module, "get_pos_emb_on_this_cp_rank", "cuda", lambda self, *args, **kwargs: self)


def _patch_split_sizes(module: Any) -> None:
    """Converts split sizes to numpy for CPU tensors, too: the all-to-all between experts expects a
    numpy array, and Megatron converts CUDA tensors only.
    """
    real = module.maybe_move_tensor_to_cpu

    @functools.wraps(real)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = real(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and isinstance(moved, torch.Tensor) else moved

    module.maybe_move_tensor_to_cpu = move


def _patch_uneven_collectives(module: Any) -> None:
    """Pads the tensors of unequal size that the processes of one expert-tensor-parallel group
    exchange: NCCL supports unequal sizes, gloo does not.
    """
    gather, reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    @functools.wraps(gather)
    def uneven_gather(
        input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        if not (longest := max(output_split_sizes)):
            return input_  # no process has a token for this expert
        padded = input_.new_zeros(longest, *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = gather(padded, group).split(longest)
        return torch.cat(
            [part[:size] for part, size in zip(parts, output_split_sizes, strict=True)]
        )

    @functools.wraps(reduce_scatter)
    def uneven_reduce_scatter(
        input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        if not (longest := max(input_split_sizes)):
            return input_
        padded = input_.new_zeros(len(input_split_sizes), longest, *input_.shape[1:])
        for place, part in zip(padded, input_.split(input_split_sizes), strict=True):
            place[: len(part)] = part
        return reduce_scatter(padded.flatten(0, 1), group)[: input_split_sizes[group.rank()]]

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = (
        uneven_gather,
        uneven_reduce_scatter,
    )


_MODULE_PATCHES: dict[str, dict[str, Callable[[Any], None]]] = {
    "rng": {"megatron.core.tensor_parallel.random": _patch_rng},
    "tensor_type": {
        "megatron.core.optimizer.optimizer": _patch_float16_optimizer,
        "megatron.core.optimizer.distrib_optimizer": _patch_distributed_optimizer,
        "megatron.core.optimizer.clip_grads": _patch_clip,
    },
    "tensor_cuda": {
        "megatron.core.models.common.language_module.language_module": _patch_tied_embeddings,
        "megatron.core.models.common.embeddings.rope_utils": _patch_context_slices,
    },
    "split_sizes": {"megatron.core.transformer.moe.moe_utils": _patch_split_sizes},
    "uneven": {"megatron.core.tensor_parallel.mappings": _patch_uneven_collectives},
}


# --- delivery
# ------------------------------------------------------------------------------------------------------------


class _Finder(importlib.abc.MetaPathFinder):
    """_Finder imports megatron.core's modules unchanged, then replaces their global `torch` with
    the view and applies the module's patch.
    """

    def __init__(self, view: types.ModuleType, after_import: dict[str, Callable[[Any], None]]):
        self.view = view
        self.after_import = after_import

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            if module.__dict__.get("torch") is torch:
                module.__dict__["torch"] = self.view
            if name in self.after_import:
                self.after_import[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
