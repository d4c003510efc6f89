"""Causal attention over a tree of segments: token sequences that begin alike, with each common
beginning computed once (core.shared_prefixes).

A segment's queries attend to their own segment, with a causal mask, and to every segment before it
on the path from the root, without a mask. Each such part is a call of a kernel that never
materialises the scores; outputs are weighted by the parts' shares of the joint softmax denominator,
as in prefix_attention.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rftmega.core.shared_prefixes import RowSegment

aten = torch.ops.aten


class AttentionSpan(NamedTuple):
    """AttentionSpan is a run of queries that attend to a run of keys, as indices of packed tokens."""

    first_query: int
    queries: int  # their number
    first_key: int
    keys: int

    @property
    def query(self) -> slice:
        return slice(self.first_query, self.first_query + self.queries)

    @property
    def key(self) -> slice:
        return slice(self.first_key, self.first_key + self.keys)


class AttentionPart(NamedTuple):
    """AttentionPart is a set of spans, each with other queries. `causal`: each span's queries and keys are
    the same tokens, under a causal mask; otherwise all its queries attend to all its keys.
    """

    spans: list[AttentionSpan]
    causal: bool


class PathBatch(NamedTuple):
    """PathBatch is a batch of segments of one length, each with the last tokens of its path."""

    queries: Tensor  # [segments, q] indices of packed tokens
    keys: Tensor  # [segments, k] the same; the last q are the queries


class SegmentTree:
    """SegmentTree holds the segments of a packed sequence, and what attention derives from them
    once for all layers.
    """

    def __init__(self, segments: Sequence[RowSegment]):
        self.segments = tuple(segments)
        self.longest = max(each.before + each.stop - each.start for each in segments)
        self.parts = _parts(self.segments)
        self._paths: dict[int | None, list[PathBatch]] = {}
        self._gathered: list[_Gathered] | None = None

    def paths(self, where: torch.device, window: int | None = None) -> list[PathBatch]:
        """Returns the segments with the keys that they attend to, for a kernel that takes a mask:
        of a sliding `window` of tokens only those within reach.
        """
        if window not in self._paths:
            self._paths[window] = [
                PathBatch(*(index.to(where, non_blocking=True) for index in batch))
                for batch in _paths(self.segments, window)
            ]
        return self._paths[window]

    def gathered(self, where: torch.device) -> "list[_Gathered]":
        """Returns the indices with which a kernel for rows of different lengths computes each part."""
        if self._gathered is None:
            self._gathered = [_Gathered(part, where) for part in self.parts]
        return self._gathered


def _parts(segments: Sequence[RowSegment]) -> list[AttentionPart]:
    """Returns the segments' own attention, and for each depth of the tree that of all tokens that
    continue a segment of this depth.
    """
    own = [AttentionSpan(s.start, s.stop - s.start, s.start, s.stop - s.start) for s in segments]
    depths: list[int] = []
    behind: dict[int, list[AttentionSpan]] = defaultdict(list)
    for each in segments:
        depths.append(depths[each.parent] + 1 if each.parent >= 0 else 0)
        if each.end > each.stop:
            span = AttentionSpan(
                each.stop, each.end - each.stop, each.start, each.stop - each.start
            )
            behind[depths[-1]].append(span)
    return [
        AttentionPart(own, True),
        *(AttentionPart(behind[depth], False) for depth in sorted(behind)),
    ]


def _paths(segments: Sequence[RowSegment], window: int | None) -> Iterable[PathBatch]:
    whole: list[Tensor] = []
    found: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for each in segments:
        own = torch.arange(each.start, each.stop)
        before = whole[each.parent] if each.parent >= 0 else own[:0]
        whole.append(torch.cat([before, own]))
        seen = whole[-1] if window is None else whole[-1][-(len(own) + window - 1) :]
        found[len(own), len(seen)].append((own, seen))
    for batch in found.values():
        queries, keys = zip(*batch, strict=True)
        yield PathBatch(torch.stack(queries), torch.stack(keys))


def attend_to_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: SegmentTree,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention of packed queries [N, heads, d] over keys and values [N, groups, d] of a
    tree of segments, and returns [N, heads, d of values]; needs `prefix_attention.has_kernel`.

    `scale`: factor of the scores, by default d^-0.5. `sinks`: a score per head [heads] that counts
    in the softmax's denominator only.
    """
    width = value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # one size for all, which CUDA's kernel can load
    widest = -(-max(query.shape[-1], width) // 8) * 8
    query, key, value = (F.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    attended: Tensor = _TreeAttention.apply(query, key, value, tree, scale, sinks)
    return attended[..., :width]


class _TreeAttention(torch.autograd.Function):
    """_TreeAttention joins the outputs of all parts by their softmax denominators. In the backward
    pass a kernel that gets the joint output and denominator computes the gradients of its part.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tree: SegmentTree,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        ctx.tree, ctx.scale = tree, scale
        kernel: Any = _OnCUDA if query.is_cuda else _OnCPU
        ctx.kernel = kernel(tree, query.device, scale)
        attended, denominator = ctx.kernel.forward(query, key, value)
        if sinks is not None:
            joint = torch.logaddexp(denominator, sinks.to(denominator.dtype))
            attended *= (denominator - joint).exp()[..., None]
            denominator = joint
        attended = attended.to(query.dtype)
        ctx.save_for_backward(query, key, value, attended, denominator, sinks)
        return attended

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, attended, denominator, sinks = ctx.saved_tensors
        grad = grads[0].contiguous()
        found = ctx.kernel.backward(grad, query, key, value, attended, denominator)
        to_sinks = None
        if sinks is not None:  # a sink's share takes from all weights of its head
            share = (sinks.to(denominator.dtype) - denominator).exp()
            taken = (grad.to(denominator.dtype) * attended).sum(-1)
            to_sinks = -(share * taken).sum(0).to(sinks.dtype)
        return *found, None, None, to_sinks


def _join(held: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor], place: Any) -> None:
    """Adds a part's output [n, heads, d] and denominators [n, heads], of the queries at `place`, to
    those of all queries, in place.
    """
    attended, denominator = held
    one, other = denominator[place], part[1]
    joint = torch.logaddexp(one, other)
    mine = attended[place] * (one - joint).exp()[..., None]
    attended[place] = mine + part[0] * (other - joint).exp()[..., None]
    denominator[place] = joint


class _OnCPU:
    """_OnCPU computes the parts with torch's CPU kernel, which takes batches of spans of one shape."""

    def __init__(self, tree: SegmentTree, where: torch.device, scale: float):
        self.tree, self.scale = tree, scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns outputs [N, heads, d] and logarithms of the softmax denominators [N, heads], in
        float32 or float64.
        """
        kind = torch.promote_types(query.dtype, torch.float32)
        held = (
            query.new_empty(query.shape, dtype=kind),
            query.new_empty(query.shape[:2], dtype=kind),
        )
        for part in self.tree.parts:
            for batch in _batches(part):
                rows = [_rows(x, own) for x, own in zip((query, key, value), batch, strict=True)]
                out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
                    *rows, 0.0, part.causal, scale=self.scale
                )
                flat = out.transpose(1, 2).flatten(0, 1), sums.transpose(1, 2).flatten(0, 1)
                if part.causal:
                    for whole, own in zip(held, flat, strict=True):
                        whole[batch[0].flat] = own.to(kind)
                else:
                    _join(held, flat, batch[0].flat)
        return held

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attended: Tensor,
        denominator: Tensor,
    ) -> list[Tensor]:
        """Returns the gradients of queries, keys and values."""
        found = [torch.empty_like(x) for x in (query, key, value)]
        for part in self.tree.parts:
            for batch in _batches(part):
                queries, keys, _ = batch
                given = [_rows(x, own) for x, own in zip((query, key, value), batch, strict=True)]
                pulls = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    _rows(grad, queries),
                    *given,
                    _rows(attended, queries),
                    _rows(denominator[..., None], queries)[..., 0].contiguous(),
                    0.0,
                    part.causal,
                    scale=self.scale,
                )
                places = (queries.flat, keys.flat, keys.flat)
                for whole, own, place in zip(found, pulls, places, strict=True):
                    flat = own.transpose(1, 2).flatten(0, 1)
                    if part.causal:  # the first part, in which each token occurs once
                        whole[place] = flat
                    else:
                        whole[place] += flat
        return found


class _Places(NamedTuple):
    """_Places are the packed tokens of several spans of one length."""

    flat: Any  # a slice, or an index [spans * length]
    spans: int


def _rows(x: Tensor, places: _Places) -> Tensor:
    """Returns packed tokens [N, heads, d] at places as a batch [spans, heads, length, d]."""
    return x[places.flat].unflatten(0, (places.spans, -1)).transpose(1, 2)


def _batches(part: AttentionPart) -> Iterable[tuple[_Places, _Places, _Places]]:
    """Returns the places of queries, keys and values of each batch of spans of one shape."""
    shapes: dict[tuple[int, int], list[AttentionSpan]] = defaultdict(list)
    for span in part.spans:
        shapes[span.queries, span.keys].append(span)
    for spans in shapes.values():
        keys = _places([span.key for span in spans])
        yield _places([span.query for span in spans]), keys, keys


def _places(runs: Sequence[slice]) -> _Places:
    if all(one.stop == other.start for one, other in zip(runs, runs[1:], strict=False)):
        return _Places(slice(runs[0].start, runs[-1].stop), len(runs))
    index = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    return _Places(index, len(runs))


class _Gathered:
    """_Gathered holds the arguments with which FlashAttention computes a part: queries and keys of
    its spans, one span after another.
    """

    def __init__(self, part: AttentionPart, where: torch.device):
        self.causal = part.causal
        self.queries, self.query_edges = _joined([span.query for span in part.spans], where)
        self.keys, self.key_edges = self.queries, self.query_edges
        if not part.causal:
            self.keys, self.key_edges = _joined([span.key for span in part.spans], where)
        self.longest_query = max(span.queries for span in part.spans)
        self.longest_key = max(span.keys for span in part.spans)

    @property
    def arguments(self) -> tuple[Any, ...]:
        edges = (self.query_edges, self.key_edges)
        return *edges, self.longest_query, self.longest_key, 0.0, self.causal


def _joined(runs: Sequence[slice], where: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the indices in all runs, and the edges of the runs among them [runs + 1] int32."""
    index = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    lengths = torch.tensor([0, *(run.stop - run.start for run in runs)])
    edges = lengths.cumsum(0).to(torch.int32)
    return index.to(where, non_blocking=True), edges.to(where, non_blocking=True)


class _OnCUDA:
    """_OnCUDA computes each part with one call of FlashAttention-2 (Dao, arXiv:2307.08691), which
    takes spans of different lengths.
    """

    def __init__(self, tree: SegmentTree, where: torch.device, scale: float):
        self.parts, self.scale = tree.gathered(where), scale
        self.seeds: list[tuple[Tensor, Tensor]] = []  # further inputs of the backward pass

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns outputs [N, heads, d] and logarithms of the softmax denominators [N, heads], in
        float32.
        """
        held = (
            query.new_empty(query.shape, dtype=torch.float32),
            query.new_empty(query.shape[:2], dtype=torch.float32),
        )
        for part in self.parts:
            out, sums, *seeds, _ = aten._flash_attention_forward(
                query[part.queries],
                key[part.keys],
                value[part.keys],
                *part.arguments,
                False,
                scale=self.scale,
            )
            self.seeds.append(tuple(seeds))
            if part.causal:
                held[0][part.queries], held[1][part.queries] = out.float(), sums.T
            else:
                _join(held, (out, sums.T), part.queries)
        return held

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attended: Tensor,
        denominator: Tensor,
    ) -> list[Tensor]:
        """Returns the gradients of queries, keys and values."""
        found = [torch.zeros_like(x) for x in (query, key, value)]
        for part, seeds in zip(self.parts, self.seeds, strict=True):
            pulls = aten._flash_attention_backward(
                grad[part.queries],
                query[part.queries],
                key[part.keys],
                value[part.keys],
                attended[part.queries],
                denominator[part.queries].T.contiguous(),
                *part.arguments,
                *seeds,
                scale=self.scale,
            )
            for whole, own, place in zip(
                found, pulls, (part.queries, part.keys, part.keys), strict=True
            ):
                whole[place] += own
        return found
