"""Gated delta net (arXiv:2412.06464), the linear attention of Qwen3-Next and Qwen3.5, over packed
rows, on a CPU and on CUDA.

Megatron-Core 0.16's own module refuses packed rows, and needs a library that runs on CUDA only. This
one has its parameters, and inherits how they are stored in distributed checkpoints.
"""

from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn import functional as F

from rftmega.models.kernels.delta_rule import (
    Chunks,
    behind_gaps,
    causal_convolution,
    divided,
    gated_delta_rule,
    order_of_rows,
)

LARGEST_DECAY = 16.0  # of an initialised head, as in transformers


class PackedDeltaNet(GatedDeltaNet):
    """PackedDeltaNet replaces self-attention in a layer: hidden states [s, b=1, H] to the same.

    Each tensor-parallel rank computes some key heads, and the value heads that they serve. Under
    context parallelism, whose ranks have parts of all rows, they exchange tokens for heads, so that
    each computes some of these heads for whole rows.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: Any,
        **_: object,
    ):
        MegatronModule.__init__(self, config)  # Megatron's own __init__ asks for a CUDA library
        self.layer_number, self.pg_collection = layer_number, pg_collection
        self.conv_bias = False
        self.tp_size, self.cp_size = pg_collection.tp.size(), pg_collection.cp.size()
        sizes = (
            config.linear_num_key_heads,
            config.linear_key_head_dim,
            config.linear_num_value_heads,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
        )
        heads, width, self.num_value_heads, self.value_head_dim, kernel = map(_known, sizes)
        self.key_head_dim = width
        self.qk_dim, self.v_dim = heads * width, self.num_value_heads * self.value_head_dim
        self.in_proj_dim = 2 * self.qk_dim + 2 * self.v_dim + 2 * self.num_value_heads
        assert config.init_method is not None
        linear: Any = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": pg_collection.tp,
        }
        kinds: Any = submodules
        self.in_proj: Any = kinds.in_proj(
            config.hidden_size,
            self.in_proj_dim,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **linear,
        )
        self.out_proj: Any = kinds.out_proj(
            self.v_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **linear,
        )
        self.conv_dim_local_tp = (2 * self.qk_dim + self.v_dim) // self.tp_size
        self.conv1d = Convolution(config, self.conv_dim_local_tp, kernel)
        mine = self.num_value_heads // self.tp_size
        rows = (self.qk_dim, self.qk_dim, self.v_dim, self.v_dim)
        # rows of in_proj on this tensor-parallel rank: q, k, v, gate, rate and decay
        self._sizes = [size // self.tp_size for size in rows] + [mine, mine]
        self.dt_bias = _of_heads(config, torch.ones(mine))
        self.A_log = _of_heads(config, torch.empty(mine).uniform_(1.0, LARGEST_DECAY).log())
        self.out_norm = GatedNorm(config, self.value_head_dim, pg_collection.tp)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the layer's output and no bias; what attention gets besides, such as rotary
        angles, is not used.
        """
        joint, _bias = self.in_proj(hidden_states)
        rows = _indices_of(packed_seq_params, self.conv1d.width, self.cp_size)
        joint = self._whole_rows(joint[:, 0], rows.order)
        keys, values, heads = (
            size // self.tp_size // self.cp_size
            for size in (self.qk_dim, self.v_dim, self.num_value_heads)
        )
        mixed, gate, rate, step = joint.split([2 * keys + values, values, heads, heads], dim=-1)
        weight = self._own(self.conv1d.weight[:, 0], self._sizes[:3])
        mixed = F.silu(causal_convolution(mixed, weight, rows.places, rows.number))
        query, key, value = mixed.split([keys, keys, values], dim=-1)
        growth, bias = (self._own(each, self._sizes[5:]) for each in (self.A_log, self.dt_bias))
        found = gated_delta_rule(
            query.unflatten(-1, (-1, self.key_head_dim)),
            key.unflatten(-1, (-1, self.key_head_dim)),
            value.unflatten(-1, (-1, self.value_head_dim)),
            -growth.float().exp() * F.softplus(step.float() + bias),
            rate.sigmoid(),
            rows.chunks,
        )
        normed = self.out_norm(found, gate.unflatten(-1, (-1, self.value_head_dim))).flatten(1)
        if self.cp_size > 1:
            normed = all_to_all_hp2sp(normed[rows.inverse], group=self.pg_collection.cp)
        output: tuple[Tensor, Tensor | None] = self.out_proj(normed[:, None])
        return output

    def _whole_rows(self, joint: Tensor, order: Tensor) -> Tensor:
        """Exchanges tokens for heads between context-parallel ranks. Maps `joint`, the output of
        in_proj [this rank's tokens, all channels], to [all tokens, the channels of this rank's
        heads]. Returns `joint` unchanged without context parallelism. `order`: the indices that
        sort the gathered tokens by row.
        """
        if self.cp_size == 1:
            return joint
        kinds = (
            each.unflatten(-1, (self.cp_size, -1)) for each in joint.split(self._sizes, dim=-1)
        )
        by_rank = torch.cat(list(kinds), -1).flatten(-2)
        return all_to_all_sp2hp(by_rank, group=self.pg_collection.cp)[order]

    def _own(self, parameter: Tensor, sizes: list[int]) -> Tensor:
        """Returns the rows of a parameter that belong to the heads which this rank computes under
        context parallelism; `sizes`: its rows of each kind.
        """
        if self.cp_size == 1:
            return parameter
        rank = self.pg_collection.cp.rank()
        return torch.cat([kind.chunk(self.cp_size)[rank] for kind in parameter.split(sizes)])


class RowIndices(NamedTuple):
    """RowIndices holds indices of the tokens of a micro-batch's packed rows."""

    number: int  # of rows
    chunks: Chunks  # of the rows
    places: Tensor  # of the tokens, with a gap before each row
    order: Tensor  # of the tokens among those gathered from context-parallel ranks
    inverse: Tensor


def _indices_of(packed: PackedSeqParams, width: int, processes: int) -> RowIndices:
    """Returns the indices for a convolution of `width` tokens and `processes` context-parallel
    ranks. The first layer computes the indices from `packed.edges` on the host (see `pack`), and
    stores them in `packed.row_indices` for later layers.
    """
    found: RowIndices | None = getattr(packed, "row_indices", None)
    if found is None:
        edges = packed.edges
        tokens, back, steps = divided(edges)
        order = order_of_rows(edges, processes) if processes > 1 else torch.arange(edges[-1])
        places = behind_gaps(edges, width - 1)
        where = packed.cu_seqlens_q.device
        tokens, back, places, order = (
            index.to(where, non_blocking=True) for index in (tokens, back, places, order)
        )
        chunks = Chunks(tokens, back, steps)
        found = RowIndices(len(edges) - 1, chunks, places, order, order.argsort())
        packed.row_indices = found
    return found


class Convolution(nn.Module):
    """Convolution holds the weight [channels of this rank, 1, width] of a convolution of each
    channel.
    """

    def __init__(self, config: TransformerConfig, channels: int, width: int):
        super().__init__()
        self.width = width
        bound = width**-0.5  # as torch initialises such a convolution
        weight = torch.empty(channels, 1, width, dtype=config.params_dtype)
        self.weight = nn.Parameter(weight.uniform_(-bound, bound))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)


class GatedNorm(nn.Module):
    """GatedNorm is an RMSNorm of each head's outputs, multiplied by silu of a gate.

    Every tensor-parallel rank has the whole weight, and some of the heads; the weight's gradient is
    summed over the ranks in the backward pass.
    """

    def __init__(self, config: TransformerConfig, width: int, group: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=config.params_dtype))
        self.epsilon, self._group = config.layernorm_epsilon, group

    def forward(self, given: Tensor, gate: Tensor) -> Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self._group)
        normed = F.rms_norm(given.float(), given.shape[-1:], eps=self.epsilon).type_as(given)
        return (weight * normed * F.silu(gate.float())).type_as(given)


def _known(size: int | None) -> int:
    assert size is not None
    return size


def _of_heads(config: TransformerConfig, values: Tensor) -> nn.Parameter:
    """Returns a parameter with one value for each value head of this tensor-parallel rank."""
    parameter = nn.Parameter(values.to(config.params_dtype))
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter
