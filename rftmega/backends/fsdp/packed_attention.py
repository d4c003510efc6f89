"""Attention over packed rows for any transformers decoder.

transformers passes queries, keys and values to an attention function that is chosen by name. This
one restricts attention to each row, so that the work grows with the squares of the row lengths
instead of the square of their total: in one kernel where possible (`takes_rows`), otherwise batched
by row length. Rows that begin alike may share the tokens of their beginning. transformers builds no
attention mask for it, since no mask function is registered under its name.
"""

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rftmega.models.kernels.prefix_attention import has_kernel
from rftmega.models.kernels.tree_attention import SegmentTree, attend_to_tree

ATTENTION = "rftmega_rows"
WIDEST = 256  # largest head size of FlashAttention, in multiples of 8
# the kernel itself supports grouped-query attention since torch 2.12
SHARES = "enable_gqa" in inspect.signature(varlen_attn).parameters
EDGES = "cu_seq_lens_q"  # of the packed rows; transformers passes it to every layer
# arguments of layers that have no effect here
NEUTRAL = frozenset(
    {
        *("position_ids", "position_embeddings", "cache_position", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("past_key_values", "logits_to_keep", "num_items_in_batch", "is_causal"),
    }
)


class Edges:
    """Edges holds the boundaries of packed rows: 0, then the end of each row.

    Tensors derived from the boundaries are sent to the device once for all layers of a micro-batch,
    without blocking the host. With a `tree`, rows share tokens, and the boundaries are those of its
    segments.
    """

    def __init__(self, edges: Sequence[int], tree: SegmentTree | None = None):
        self.edges, self.tree = tuple(edges), tree
        self._offsets: Tensor | None = None
        self._places: tuple[list[tuple[Tensor, torch.Size]], Tensor] | None = None

    @property
    def longest(self) -> int:
        return max(stop - start for start, stop in zip(self.edges, self.edges[1:], strict=False))

    def offsets(self, where: torch.device) -> Tensor:
        """Returns the boundaries as an int32 tensor on device `where`."""
        if self._offsets is None:
            offsets = torch.tensor(self.edges, dtype=torch.int32)
            self._offsets = offsets.to(where, non_blocking=True)
        return self._offsets

    def places(self, where: torch.device) -> tuple[list[tuple[Tensor, torch.Size]], Tensor]:
        """Returns (batches, order) for attention batched by row length, on device `where`.

        batches: for each row length the indices of its rows' tokens in the packed sequence,
        flattened, with their shape [rows, length]. order: the indices that bring the batches'
        concatenated outputs back into packed order.
        """
        if self._places is None:
            indices = [
                torch.tensor(starts)[:, None] + torch.arange(length)
                for starts, length in rows_by_length(self.edges)
            ]
            back = torch.cat([index.flatten() for index in indices]).argsort()
            there = [
                (index.flatten().to(where, non_blocking=True), index.shape) for index in indices
            ]
            self._places = there, back.to(where, non_blocking=True)
        return self._places


class Unpackable(Exception):
    """Unpackable is raised if a layer needs a feature that attention over packed rows does not
    support.
    """


def attend_rows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within each row: queries [1, heads, N, d] over keys and values [1,
    groups, N, d] -> [1, N, heads, d].

    A token attends to at most `sliding_window` tokens, itself included. `scaling`: factor of the
    scores, by default d^-0.5. `softcap` bounds the scores by a hyperbolic tangent (Gemma 2,
    arXiv:2408.00118); `s_aux` [heads] are the scores of an attention sink, which counts only in the
    softmax's denominator (gpt-oss). `others` must contain the row boundaries, an `Edges` under the
    key EDGES. Raises Unpackable for unsupported arguments.
    """
    unknown = {name for name, given in others.items() if given is not None} - NEUTRAL - {EDGES}
    if unknown:
        raise Unpackable(f"its attention is also told {', '.join(sorted(unknown))}")
    if attention_mask is not None or len(query) != 1 or others.get("is_causal") is False:
        raise Unpackable("its attention has a mask of its own, or is not causal")
    edges: Edges = others[EDGES]
    if edges.tree is not None:
        given = [query[0], key[0], value[0]]
        bounds = _Bounds(scaling, dropout, sliding_window, softcap, s_aux)
        return _attend_to_tree(given, edges, edges.tree, bounds)[None], None
    if takes_rows(query, value) and softcap is None and s_aux is None and not dropout:
        return _attend_at_once(query, key, value, edges, scaling, sliding_window), None
    parts = []
    lengths, back = edges.places(query.device)
    for place, shape in lengths:
        rows = [x[0][:, place].unflatten(1, shape).transpose(0, 1) for x in (query, key, value)]
        attended = _attend(rows, scaling, dropout, sliding_window, softcap, s_aux)
        parts.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[back][None], None


class _Bounds(NamedTuple):
    """_Bounds holds the arguments of `attend_rows` that bound or scale the scores."""

    scaling: float | None
    dropout: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def _attend_to_tree(
    given: Sequence[Tensor], edges: Edges, tree: SegmentTree, bounds: _Bounds
) -> Tensor:
    """Computes attention of rows that share tokens: queries [heads, N, d], keys and values [groups,
    N, d] -> [N, heads, d]. `edges`: the boundaries of the tree's segments.

    Without a soft cap, dropout and an effective window, kernels compute each segment once and never
    materialise the scores. With an effective window, FlashAttention does this on CUDA, if there are
    no sinks. In all other cases each segment is computed with the keys of its whole path. A window
    is effective if some row is longer than the window.
    """
    query, key, value = (x.transpose(0, 1) for x in given)
    window = bounds.window
    if window is not None and window >= tree.longest:
        window = None
    plain = window is None and bounds.softcap is None and not bounds.dropout
    if plain and has_kernel(query):
        return attend_to_tree(query, key, value, tree, bounds.scaling, bounds.sinks)
    bare = bounds.softcap is None and bounds.sinks is None and not bounds.dropout
    if window is not None and bare and takes_rows(given[0], given[2]):
        index, of_keys, longest = tree.reached(query.device, window)
        spans = _Spans(edges.offsets(query.device), of_keys, edges.longest, longest)
        return _flash_rows(query, key[index], value[index], spans, bounds.scaling, window)
    batches = tree.paths(query.device, window)
    outputs = []
    for batch in batches:
        rows = [x[batch.keys].transpose(1, 2) for x in (key, value)]
        rows = [query[batch.queries].transpose(1, 2), *rows]
        attended = _attend(
            rows, bounds.scaling, bounds.dropout, window, bounds.softcap, bounds.sinks
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    order = torch.cat([batch.queries.flatten() for batch in batches])
    return torch.cat(outputs)[order.argsort()]


def takes_rows(query: Tensor, value: Tensor) -> bool:
    """Returns whether torch has a kernel for rows of different lengths with these tensors:
    FlashAttention on CUDA, in half precision.
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    size = query.shape[-1]
    return query.is_cuda and half and size == value.shape[-1] <= WIDEST and size % 8 == 0


def _attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edges: Edges,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Runs FlashAttention-2 (Dao, arXiv:2307.08691) over packed rows: queries [1, heads, N, d] over
    keys and values [1, groups, N, d] -> [1, N, heads, d].

    `edges`: the row boundaries. `scaling`: factor of the scores. `window`: number of tokens that a
    token attends to, itself included; None: all earlier ones.
    """
    offsets, longest = edges.offsets(query.device), edges.longest
    query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    spans = _Spans(offsets, offsets, longest, longest)
    return _flash_rows(query, key, value, spans, scaling, window)[None]


class _Spans(NamedTuple):
    """_Spans holds the boundaries of each row's queries and keys. The queries are the row's last
    tokens, so a row has at least as many keys as queries.
    """

    query_edges: Tensor  # [rows + 1] int32
    key_edges: Tensor
    longest_query: int
    longest_key: int


def _flash_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: _Spans,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Runs FlashAttention-2 over rows: queries [n, heads, d] over keys and values [k, groups, d] ->
    [n, heads, d]; the last query of a row is at the position of its last key. `scaling`, `window`:
    see `_attend_at_once`.
    """
    before = -1 if window is None else window - 1  # tokens beside its own
    sharing: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if SHARES:
            sharing["enable_gqa"] = True
        else:
            each = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(each, 1) for x in (key, value))
    attended: Tensor = varlen_attn(  # type: ignore[assignment]
        query.contiguous(),
        key,
        value,
        *spans,
        scale=scaling,
        window_size=(before, 0),
        **sharing,
    )
    return attended


def rows_by_length(edges: Sequence[int]) -> list[tuple[list[int], int]]:
    """Returns ([first token of each row], length) for each row length; the rows of one length form
    a batch.

    `edges`: the row boundaries in the packed sequence: the index of each row's first token, then
    the total number of tokens.
    """
    found: dict[int, list[int]] = defaultdict(list)
    for start, stop in zip(edges, edges[1:], strict=False):
        found[stop - start].append(start)
    return [(starts, length) for length, starts in found.items()]


def _attend(
    rows: Sequence[Tensor],
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes causal attention for a batch of rows of one length n, or of the last q tokens of such
    rows.

    `rows`: queries [rows, heads, q, d], keys and values [rows, groups, n, d]. `scaling`: factor of
    the scores. `window`: number of tokens that a token attends to, itself included. `softcap`,
    `sinks`: see `attend_rows` (`s_aux`).
    """
    query, key, value = rows
    queries, length = query.shape[2], key.shape[2]
    mask = None
    if queries < length or (window is not None and window < length):
        mask = _causal(queries, length, query.device)
    if mask is not None and window is not None:
        mask = mask.triu(length - queries + 1 - window)
    if softcap is not None or sinks is not None:
        return _attend_plainly(rows, scaling, dropout, mask, softcap, sinks)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_plainly(
    rows: Sequence[Tensor],
    scaling: float | None,
    dropout: float,
    mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes attention with bounded scores (`softcap`) or attention sinks (`sinks` [heads]) in
    plain torch, since no torch kernel supports them.

    `rows`: queries, keys and values as in `_attend`. `mask` [q, n] is True where a query attends to
    a key; None: causal.
    """
    query, key, value = rows
    heads, queries, length = query.shape[1], query.shape[2], key.shape[2]
    shared = heads // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is None:
        mask = _causal(queries, length, query.device)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[None, :, None, None].expand(len(query), -1, queries, 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., :length]
    return F.dropout(weights, dropout) @ value


def _causal(queries: int, keys: int, where: torch.device) -> Tensor:
    """Returns the causal mask [queries, keys] of the last queries of a row."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=where)
    return seen.tril(keys - queries)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend_rows)
