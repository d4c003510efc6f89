"""Stands for Transformer Engine 2 on a CPU: its modules in plain torch, for Megatron's own wrappers
to build upon.

Names of parameters, their attributes, signatures and collectives are Transformer Engine's; its
kernels are not here. `install` comes before the first import of Megatron (see `preloaded_te.py`),
which then believes in it: specs, fused names in checkpoints and the marks on parameters are
Megatron's.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn import functional as F

VERSION = "2.9.0"


class _Base(Module):
    """What all of its modules with weights have."""

    def __init__(
        self,
        *,
        tp_group: Any,
        tp_size: int,
        sequence_parallel: bool,
        parallel_mode: str | None,
        fuse: bool,
    ):
        super().__init__()
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse
        self.fp8 = self.fp8_calibration = self.save_original_input = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def _weight(self, name: str, out: int, into: int, dtype: torch.dtype, init_method: Any) -> None:
        weight = Parameter(torch.empty(out, into, dtype=dtype))
        init_method(weight)
        # So it does whatever the parallel mode is: a layer that every rank has whole is marked as
        # well.
        weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        weight.partition_dim = 1 if self.parallel_mode == "row" else 0  # type: ignore[attr-defined]
        weight.partition_stride = 1  # type: ignore[attr-defined]
        self.register_parameter(name, weight)

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        if Recipes.entered:
            tokens, (out, into) = x.numel() // x.shape[-1], weight.shape
            assert not (tokens % 16 or out % 16 or into % 16), (tokens, out, into)
            # the gradient passes as if nothing was rounded
            x = x + (_rounded(x.detach(), 1) - x.detach())
            weight_here = _rounded(weight.detach(), 128)
            return _Rounded.apply(x, weight, weight_here)
        accumulates = (
            self.fuse_wgrad_accumulation and weight.requires_grad
        )  # a frozen one has no gradient
        return _Accumulated.apply(x, weight) if accumulates else F.linear(x, weight)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...


class Recipes:
    """Recipes of 8 bits in whose context the modules are now."""

    entered: ClassVar[list[Any]] = []


@contextmanager
def fp8_autocast(*, enabled: bool, fp8_recipe: Any, fp8_group: Any) -> Iterator[None]:
    assert enabled and type(fp8_recipe).__name__ == "Float8BlockScaling"
    Recipes.entered.append(fp8_recipe)
    try:
        yield
    finally:
        Recipes.entered.pop()


def _rounded(matrix: Tensor, high: int) -> Tensor:
    """Rounds to e4m3 with a scale for each `high` rows and 128 columns."""
    found = torch.empty_like(matrix)
    rows, into = matrix.flatten(0, -2), found.flatten(0, -2)
    for top in range(0, len(rows), high):
        for left in range(0, rows.shape[1], 128):
            block = rows[top : top + high, left : left + 128].float()
            scale = block.abs().max().clamp(min=1e-12) / 448
            narrow = (block / scale).to(torch.float8_e4m3fn).float() * scale
            into[top : top + high, left : left + 128] = narrow.to(matrix.dtype)
    return found


class _Rounded(torch.autograd.Function):
    """A product of rounded matrices, whose gradients are those of a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, rounded: Tensor) -> Tensor:
        ctx.save_for_backward(x, rounded)
        ctx.weight = weight
        return F.linear(x, rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad,), (x, held), weight = grads, ctx.saved_tensors, ctx.weight
        slope = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        weight.main_grad.add_(slope.to(weight.main_grad.dtype))
        weight.grad_added_to_main_grad = True
        return grad @ held, torch.full_like(held, torch.nan), None


class Fp8Padding(Module):
    def __init__(self, num_gemms: int):
        super().__init__()

    def forward(self, x: Tensor, tokens: list[int]) -> tuple[Tensor, list[int]]:
        """Adds rows of zeros to each expert's, up to a multiple of 16."""
        padded = [-(-number // 16) * 16 for number in tokens]
        parts = [
            F.pad(part, (0, 0, 0, many - len(part)))
            for part, many in zip(x.split(tokens), padded, strict=True)
        ]
        return torch.cat(parts), padded


class Fp8Unpadding(Module):
    def __init__(self, num_gemms: int):
        super().__init__()

    def forward(self, x: Tensor, tokens: list[int]) -> Tensor:
        padded = [-(-number // 16) * 16 for number in tokens]
        parts = zip(x.split(padded), tokens, strict=True)
        return torch.cat([part[:number] for part, number in parts])


class _Accumulated(torch.autograd.Function):
    """A weight's gradient goes into main_grad at once; what autograd gets in its place is nobody's
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (x, held), weight = grads, ctx.saved_tensors, ctx.weight
        weight.main_grad.add_(
            (grad.flatten(0, -2).t() @ x.flatten(0, -2)).to(weight.main_grad.dtype)
        )
        weight.grad_added_to_main_grad = True
        return grad @ held, torch.full_like(
            held, 0.0 if getattr(weight, "zero_out_wgrad", False) else torch.nan
        )


class Linear(_Base):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: Any,
        tp_size: int,
        init_method: Any,
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        **_: Any,
    ):
        super().__init__(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            parallel_mode=parallel_mode,
            fuse=fuse_wgrad_accumulation,
        )
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.use_bias, self.return_bias = bias, return_bias
        self._weight("weight", self.out_features, self.in_features, params_dtype, init_method)
        self.bias: Any = (
            Parameter(torch.zeros(self.out_features, dtype=params_dtype))
            if bias
            else torch.empty(0)
        )
        if bias and parallel_mode == "column":
            self.bias.tensor_model_parallel, self.bias.partition_dim, self.bias.partition_stride = (
                True,
                0,
                1,
            )
        if bias and parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core import tensor_parallel as parallel

        group, split = self.tp_group, self.tp_size > 1
        if split and self.parallel_mode == "column":
            whole = (
                parallel.gather_from_sequence_parallel_region if self.sequence_parallel else None
            )
            x = (
                whole(x, group=group)
                if whole
                else parallel.copy_to_tensor_model_parallel_region(x, group=group)
            )
        y = self._multiply(x, self.weight)
        if split and self.parallel_mode == "row":
            scatter = parallel.reduce_scatter_to_sequence_parallel_region
            y = (
                scatter(y, group=group)
                if self.sequence_parallel
                else parallel.reduce_from_tensor_model_parallel_region(y, group=group)
            )
        if self.return_bias:
            return y, self.bias
        return y + self.bias if self.use_bias else y


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        normalization: str,
        params_dtype: torch.dtype,
        zero_centered_gamma: bool = False,
        **rest: Any,
    ):
        super().__init__(in_features, out_features, params_dtype=params_dtype, **rest)
        self.zero_centered_gamma = zero_centered_gamma
        assert normalization == "RMSNorm", normalization
        self.eps = eps
        self.layer_norm_weight = Parameter(torch.ones(in_features, dtype=params_dtype))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        weight = self.layer_norm_weight + 1.0 * self.zero_centered_gamma
        return super().forward(F.rms_norm(x, x.shape[-1:], weight, self.eps))


class GroupedLinear(_Base):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: Any,
        tp_size: int,
        init_method: Any,
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        **_: Any,
    ):
        super().__init__(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            parallel_mode=parallel_mode,
            fuse=fuse_wgrad_accumulation,
        )
        assert tp_size == 1, "Megatron's experts divide their matrices themselves"
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        for number in range(num_gemms):
            self._weight(f"weight{number}", out_features, in_features, params_dtype, init_method)
            if bias:
                made: Any = Parameter(torch.zeros(out_features, dtype=params_dtype))
                if parallel_mode == "row":
                    made.sequence_parallel = sequence_parallel
                self.register_parameter(f"bias{number}", made)

    def forward(
        self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Any:
        parts = [
            self._multiply(part, getattr(self, f"weight{number}"))
            for number, part in enumerate(x.split(m_splits))
        ]
        biases = [
            getattr(self, f"bias{number}") for number in range(self.num_gemms * self.use_bias)
        ]
        if self.return_bias:
            return torch.cat(parts), biases
        if self.use_bias:
            parts = [part + bias for part, bias in zip(parts, biases, strict=True)]
        return torch.cat(parts)


class RMSNorm(Module):
    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float,
        sequence_parallel: bool,
        params_dtype: torch.dtype,
        zero_centered_gamma: bool = False,
        **_: Any,
    ):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = Parameter(torch.ones(hidden_size, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 1.0 * self.zero_centered_gamma
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


def places(edges: list[int], processes: int) -> Tensor:
    """For the zig-zag of context parallelism: where each token of the rows lies among the gathered
    ones, process by process.
    """
    found = torch.empty(edges[-1], dtype=torch.int64)
    for begin, end in pairwise(edges):
        chunk = (end - begin) // (2 * processes)
        for number in range(2 * processes if chunk else 0):
            holder, second = (number, 0) if number < processes else (2 * processes - 1 - number, 1)
            there = holder * edges[-1] // processes + begin // processes + second * chunk
            found[begin + number * chunk : begin + (number + 1) * chunk] = torch.arange(
                there, there + chunk
            )
    return found if processes > 1 else torch.arange(edges[-1])


class DotProductAttention(Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        *,
        attention_dropout: float,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] | None = None,
        cp_group: Any = None,
        num_gqa_groups: int,
        tp_size: int,
        **_: Any,
    ):
        super().__init__()
        assert attention_dropout == 0.0, "no dropout here"
        assert num_gqa_groups % tp_size == 0, "so many groups can't be shared equally"
        width = kv_channels[0] if isinstance(kv_channels, tuple) else kv_channels
        self.scale = width**-0.5 if softmax_scale is None else softmax_scale
        self.window, self.group = window_size, cp_group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: str,
        qkv_format: str,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """[tokens, heads, d] -> [tokens, heads * d], row by row, with all scores of a row in
        memory.
        """
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather

        # the kernels take the places of rows from the padded boundaries
        for padded, plain in (
            (cu_seqlens_q_padded, cu_seqlens_q),
            (cu_seqlens_kv_padded, cu_seqlens_kv),
        ):
            assert padded is None or torch.equal(padded, plain), (padded, plain)
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal"), (
            qkv_format,
            attn_mask_type,
        )
        edges = cu_seqlens_q.tolist()
        order = places(edges, self.group.size() if self.group else 1)
        if self.group:
            query, key, value = (gather(x, group=self.group)[order] for x in (query, key, value))
        repeat = query.shape[1] // key.shape[1]
        rows = []
        for begin, end in pairwise(edges):
            q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
            scores = self.scale * q @ k.repeat_interleave(repeat, 0).transpose(1, 2)
            # how far a key lies before the query
            behind = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            hidden = (behind < 0) | (behind > (self.window[0] if self.window else end))
            rows.append(
                (
                    scores.masked_fill(hidden, -torch.inf).softmax(-1)
                    @ v.repeat_interleave(repeat, 0)
                ).transpose(0, 1)
            )
        attended = torch.cat(rows).flatten(1)
        if self.group:
            mine = len(order) // self.group.size()
            attended = attended[order.argsort()[self.group.rank() * mine :][:mine]]
        return attended


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str,
    *,
    fused: bool,
    cu_seqlens: Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """Turns the beginning of [tokens, heads, d], as much as there are angles for; every row's
    positions count from 0, its zig-zag chunks keep theirs.
    """
    assert fused and tensor_format == "thd" and not interleaved, tensor_format
    edges = cu_seqlens.tolist()
    positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise(edges)])
    if cp_size > 1:
        positions = positions[places(edges, cp_size).argsort()[cp_rank * len(t) :][: len(t)]]
    angles = freqs[positions, 0].float()
    turned, rest = t[..., : angles.shape[-1]].float(), t[..., angles.shape[-1] :]
    left, right = turned.chunk(2, -1)
    turned = turned * angles.cos() + torch.cat([-right, left], -1) * angles.sin()
    return torch.cat([turned.to(t.dtype), rest], -1)


def install() -> None:
    """Raises AssertionError where Megatron was imported before."""
    assert "megatron.core" not in sys.modules, "the stub comes too late"

    def unused(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no fused router here")

    def module(name: str, **names: Any) -> None:
        made = types.ModuleType(f"transformer_engine{name}")
        vars(made).update(names)
        sys.modules[made.__name__] = made
        parent, _, child = made.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, made)

    empty = {
        name: type(name, (), {})
        for name in ("DelayedScaling", "CudaRNGStatesTracker", "QuantizedTensor")
    }
    enabled = staticmethod(lambda: bool(Recipes.entered))
    state = type("FP8GlobalStateManager", (), {"is_fp8_enabled": enabled})
    recipe = type("Float8BlockScaling", (), {"__init__": lambda self, fp8_format: None})
    formats = types.SimpleNamespace(E4M3="e4m3")
    routers = (
        "fused_topk_with_score_function",
        "fused_compute_score_for_moe_aux_loss",
        "fused_moe_aux_loss",
    )
    layers = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention)
    module("", __version__=VERSION)
    module(".common")
    module(
        ".common.recipe",
        DelayedScaling=empty["DelayedScaling"],
        Float8BlockScaling=recipe,
        Format=formats,
    )
    paddings = {"Fp8Padding": Fp8Padding, "Fp8Unpadding": Fp8Unpadding}
    layered = {layer.__name__: layer for layer in layers}
    module(".pytorch", **layered, **paddings, fp8_autocast=fp8_autocast)
    module(".pytorch.fp8", FP8GlobalStateManager=state, fp8_autocast=fp8_autocast)
    module(
        ".pytorch.distributed",
        CudaRNGStatesTracker=empty["CudaRNGStatesTracker"],
        activation_recompute_forward=unused,
    )
    module(".pytorch.tensor", QuantizedTensor=empty["QuantizedTensor"])
    module(".pytorch.router", **dict.fromkeys(routers, unused))
    module(".pytorch.ops", Sequential=Module, FusibleOperation=Module)
    module(".pytorch.attention")
    module(".pytorch.attention.rope", apply_rotary_pos_emb=apply_rotary_pos_emb)
