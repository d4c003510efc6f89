"""Core attention over packed rows in plain torch: a token attends only to tokens of its own row,
and padding is not computed. Rows that begin alike may share the tokens of their beginning.
Under context parallelism each process computes two chunks of every row (context_attention.py).
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.nn import functional as F

from rftmega.core.errors import ConfigError
from rftmega.models.kernels.prefix_attention import attend_to_prefix, has_kernel
from rftmega.models.kernels.tree_attention import SegmentTree, attend_to_tree
from rftmega.models.layers.context_attention import (
    RowChunk,
    attend_across,
    chunks_of,
    gathered,
)

BLOCK = 128  # minimum number of queries that share a window mask
LONGEST = 8192  # longest row whose chunks may have a mask each


class PackedAttention(torch.nn.Module):
    """PackedAttention computes causal, grouped-query attention.

    It replaces Megatron's DotProductAttention on a CPU, and on CUDA without Transformer Engine.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: object,
    ):
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal, attn_mask_type
        self.scale = softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        # in tokens, including the token itself
        self.window = config.window_size[0] + 1 if windowed and config.window_size else None
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.context_group = pg_collection.cp if config.context_parallel_size > 1 else None
        # a score per head that counts in the softmax's denominator only
        self.register_parameter("softmax_offset", None)  # named as in Megatron's own attention
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = _sinks(config, heads)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Returns the sinks, of which each tensor-parallel rank has those of its heads, for
        Megatron's distributed checkpoints; {} if there are none.
        """
        state = self.state_dict(keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, dict.fromkeys(state, 0), sharded_offsets
        )
        return found

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Computes attention of packed rows, [tokens, heads, d] -> [tokens, heads * d], or without
        `packed_seq_params` of unpacked rows, [s, b, heads, d] -> [s, b, heads * d].
        Under context parallelism the tokens are this process's, and `cu_seqlens_q` describes the
        whole rows. With `packed_seq_params.tree` rows share tokens.
        """
        assert attention_bias is None, "attention_bias is not supported"
        if packed_seq_params is None:
            assert self.context_group is None, "context parallelism needs packed rows"
            rows = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(*rows).permute(2, 0, 1, 3).flatten(2)
        self._refuse_long_rows(query, packed_seq_params)
        tree: SegmentTree | None = getattr(packed_seq_params, "tree", None)
        longest: Any = packed_seq_params.max_seqlen_q
        window = self.window if self.window is not None and self.window < longest else None
        has_no_mask = window is None and not self._dropout and has_kernel(query)
        if tree is not None:
            if has_no_mask:
                attended = attend_to_tree(query, key, value, tree, self.scale, self.softmax_offset)
                return attended.flatten(1)
            parts = [RowChunk(*batch) for batch in tree.paths(query.device, window)]
            return self._attend_in_parts(query, key, value, parts)
        group = self.context_group
        chunks = chunks_of(
            packed_seq_params, *((0, 1) if group is None else (group.rank(), group.size()))
        )
        if group is None:
            return self._attend_in_parts(query, key, value, chunks.batches)
        if has_no_mask:
            given = query, key, value, chunks, group, self.scale, self.softmax_offset
            return attend_across(*given).flatten(1)
        parts = [chunk.within(window) for chunk in chunks.batches]
        key, value = gathered(key, value, chunks, group)
        return self._attend_in_parts(query, key, value, parts)

    def _attend_in_parts(
        self, query: Tensor, key: Tensor, value: Tensor, parts: Sequence[RowChunk]
    ) -> Tensor:
        """Computes attention of packed tokens, [n, heads, d] -> [n, heads * d], in batches."""
        # rows of one length are contiguous: nothing is copied
        if len(parts) == 1 and parts[0].whole:
            rows = (
                x.unflatten(0, parts[0].queries.shape).transpose(1, 2) for x in (query, key, value)
            )
            return self._attend(*rows).transpose(1, 2).flatten(0, 1).flatten(1)
        outputs = []
        for part in parts:
            queries = query[part.queries].transpose(1, 2)
            attended = self._attend(queries, part.of_keys(key), part.of_keys(value))
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        order = torch.cat([part.queries.flatten() for part in parts])
        return torch.cat(outputs)[order.argsort()].flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Computes attention of queries [b, heads, q, d] over keys and values [b, groups, k, d],
        and returns [b, heads, q, d].
        The last query is at the position of the last key.
        """
        queries, keys = query.shape[2], key.shape[2]
        if self.window is not None and self.window < keys:
            return self._attend_within(self.window, query, key, value)
        sinks = self.softmax_offset
        if queries == keys and sinks is None:
            return self._kernel(query, key, value)
        if self._dropout or not has_kernel(query):
            return self._kernel(query, key, value, _band(queries, keys, keys, query.device))
        return attend_to_prefix(query, key, value, self.scale, sinks)

    def _attend_within(self, window: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Computes attention within a sliding window of `window` tokens; each block of queries
        attends to the keys that the windows of the block cover.
        """
        queries, keys = query.shape[2], key.shape[2]
        before = keys - queries
        size = max(window, BLOCK)
        found = []
        for first in range(0, queries, size):
            last = min(first + size, queries)
            reached = slice(max(0, before + first - window + 1), before + last)
            mask = _band(last - first, reached.stop - reached.start, window, query.device)
            found.append(
                self._kernel(
                    query[:, :, first:last], key[:, :, reached], value[:, :, reached], mask
                )
            )
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def _kernel(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        if mask is not None and self.softmax_offset is not None:
            key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
            mask = _with_sinks(mask, self.softmax_offset.to(query.dtype))
        # Heads differ between tensor-parallel processes, so dropout must differ, too.
        stream = (
            tensor_parallel.get_cuda_rng_tracker().fork()
            if self._dropout
            else contextlib.nullcontext()
        )
        with stream:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=query.shape[1] != key.shape[1],
                scale=self.scale,
                dropout_p=self._dropout,
            )

    def _refuse_long_rows(self, query: Tensor, packed: PackedSeqParams) -> None:
        """Raises ConfigError for rows longer than LONGEST if only a kernel with a mask supports
        them, or their chunks, because the mask would not fit in memory.
        """
        if self.context_group is None and self.softmax_offset is None:
            return
        masked = self.window is None and (self._dropout or not has_kernel(query))
        if masked and packed.max_seqlen_q > LONGEST:
            why = "attention sinks" if self.context_group is None else "context parallelism"
            what = (
                "model.dropout above 0"
                if self._dropout
                else f"{query.dtype} with heads of {query.shape[-1]} on CUDA"
            )
            raise ConfigError(
                f"A row of {packed.max_seqlen_q} tokens under {why} with {what}: without Transformer Engine its "
                f"mask would grow with the square of the row, so rows of up to {LONGEST} tokens are taken. Set model.dropout=0 "
                "and model.dtype=bfloat16, parallel.context=1, or install Transformer Engine."
            )


def _sinks(config: TransformerConfig, heads: int) -> torch.nn.Parameter:
    """Returns initialised attention sinks of the `heads` of this tensor-parallel rank."""
    sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(sinks, True, 0, 1)
    assert config.init_method is not None
    config.init_method(sinks)
    return sinks


def _with_sinks(mask: Tensor, sinks: Tensor) -> Tensor:
    """Returns the scores [heads, queries, keys + 1] to add for a mask [queries, keys] and one more
    key, which is 0: the sinks.
    """
    seen = sinks.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
    shape = (len(sinks), *mask.shape)
    last = sinks[:, None, None].expand(*shape[:2], 1)
    return torch.cat([seen.expand(shape), last], -1)


def _band(queries: int, keys: int, window: int, where: torch.device) -> Tensor:
    """Returns the attention mask [queries, keys]: True for the `window` last keys up to the query's
    own position.
    The last query is at the position of the last key.
    """
    seen = torch.ones(queries, keys, dtype=torch.bool, device=where).tril(keys - queries)
    return seen.triu(keys - queries - window + 1) if window < keys else seen
