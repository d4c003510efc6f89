"""Causal attention over a tree of segments: token sequences that begin alike, with each common
beginning computed once (core.shared_prefixes).

A segment's queries attend to their own segment, with a causal mask, and to every segment before it
on the path from the root, without a mask. Each such part is a call of a kernel that never
materialises the scores; outputs are weighted by the parts' shares of the joint softmax denominator,
as in prefix_attention.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rftmega.core.shared_prefixes import RowSegment
from rftmega.models.kernels.prefix_attention import padded_heads

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
        self._calls: list[_Call] | None = None
        self._reached: dict[int, tuple[Tensor, Tensor, int]] = {}

    def paths(self, where: torch.device, window: int | None = None) -> list[PathBatch]:
        """Returns batches of segments with the keys that they attend to, for attention with a mask.
        With a sliding `window`, keys that no token of a segment can reach are left out.
        """
        if window not in self._paths:
            self._paths[window] = [
                PathBatch(*(index.to(where, non_blocking=True) for index in batch))
                for batch in _paths(self.segments, window)
            ]
        return self._paths[window]

    def reached(self, where: torch.device, window: int) -> tuple[Tensor, Tensor, int]:
        """Returns the packed tokens within reach of each segment's sliding `window` of tokens, the
        segments' own included, one segment after another; their edges [segments + 1] int32; and the
        largest number of a segment.
        """
        if window not in self._reached:
            keys = _reached(self.segments, window)
            edges = torch.tensor([0, *map(len, keys)]).cumsum(0).to(torch.int32)
            index = torch.cat(keys).to(where, non_blocking=True)
            self._reached[window] = (index, edges.to(where, non_blocking=True), max(map(len, keys)))
        return self._reached[window]

    def calls(self, where: torch.device) -> "list[_Call]":
        """Returns the kernel calls that compute all parts, each segment's own attention first."""
        if self._calls is None:
            if where.type == "cuda":
                self._calls = [_Gathered(part, where) for part in self.parts]
            else:
                self._calls = [batch for part in self.parts for batch in _batches(part)]
        return self._calls


def _parts(segments: Sequence[RowSegment]) -> list[AttentionPart]:
    """Returns the parts of the attention. The first part is the attention of each segment to
    itself. Then comes one part per depth of the tree: the tokens that continue a segment of this
    depth attend to this segment.
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


def _reached(segments: Sequence[RowSegment], window: int | None) -> list[Tensor]:
    """Returns, for each segment, the packed tokens that its tokens attend to: all tokens of its
    path, or only those within a sliding `window`. The segment's own tokens come last.
    """
    whole: list[Tensor] = []
    for each in segments:
        before = whole[each.parent] if each.parent >= 0 else torch.arange(0)
        whole.append(torch.cat([before, torch.arange(each.start, each.stop)]))
    if window is None:
        return whole
    return [
        path[-(each.stop - each.start + window - 1) :]
        for path, each in zip(whole, segments, strict=True)
    ]


def _paths(segments: Sequence[RowSegment], window: int | None) -> Iterable[PathBatch]:
    found: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for each, seen in zip(segments, _reached(segments, window), strict=True):
        own = torch.arange(each.start, each.stop)
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
    attended: Tensor = _TreeAttention.apply(*padded_heads(query, key, value), tree, scale, sinks)
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
        ctx.calls, ctx.scale, ctx.seeds = tree.calls(query.device), scale, []
        kind = torch.promote_types(query.dtype, torch.float32)
        attended = query.new_empty(query.shape, dtype=kind)
        denominator = query.new_empty(query.shape[:2], dtype=kind)
        for call in ctx.calls:
            given = query[call.queries], key[call.keys], value[call.keys]
            out, sums, seeds = call.forward(*given, scale)
            ctx.seeds.append(seeds)
            if call.causal:
                attended[call.queries], denominator[call.queries] = out.to(kind), sums.to(kind)
            else:
                _join((attended, denominator), (out, sums), call.queries)
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
        found = [torch.empty_like(x) for x in (query, key, value)]
        for call, seeds in zip(ctx.calls, ctx.seeds, strict=True):
            of_queries = (x[call.queries] for x in (grad, query, attended, denominator))
            pulls = call.backward(*of_queries, key[call.keys], value[call.keys], seeds, ctx.scale)
            places = (call.queries, call.keys, call.keys)
            for whole, own, place in zip(found, pulls, places, strict=True):
                if call.causal:  # every token occurs in one of these, which come first
                    whole[place] = own
                else:
                    whole[place] += own
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


class _Call(Protocol):
    """_Call computes the attention of some queries to some keys with one kernel call."""

    causal: bool  # queries and keys are the same tokens
    queries: Any  # packed tokens: a slice, or an index [n]
    keys: Any  # the same [k]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Returns outputs [n, heads, d], logarithms of the softmax denominators [n, heads], and
        further inputs of the backward pass.
        """

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        attended: Tensor,
        denominator: Tensor,
        key: Tensor,
        value: Tensor,
        seeds: tuple[Tensor, ...],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of queries, keys and values, from the joint outputs `attended` and
        denominators.
        """


@dataclass(slots=True)
class _Batch:
    """_Batch computes spans of one shape with torch's kernel for a CPU."""

    causal: bool
    queries: Any
    keys: Any
    spans: int

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        rows = [self._rows(x) for x in (query, key, value)]
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            *rows, 0.0, self.causal, scale=scale
        )
        return out.transpose(1, 2).flatten(0, 1), sums.transpose(1, 2).flatten(0, 1), ()

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        attended: Tensor,
        denominator: Tensor,
        key: Tensor,
        value: Tensor,
        seeds: tuple[Tensor, ...],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = self._rows(denominator[..., None])[..., 0].contiguous()
        rows = [self._rows(x) for x in (grad, query, key, value, attended)]
        pulls = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *rows, sums, 0.0, self.causal, scale=scale
        )
        return tuple(pull.transpose(1, 2).flatten(0, 1) for pull in pulls)  # type: ignore[return-value]

    def _rows(self, x: Tensor) -> Tensor:
        """Maps [spans * length, heads, d] to [spans, heads, length, d]."""
        return x.unflatten(0, (self.spans, -1)).transpose(1, 2)


def _batches(part: AttentionPart) -> Iterable[_Batch]:
    """Returns a batch for each shape of the part's spans."""
    shapes: dict[tuple[int, int], list[AttentionSpan]] = defaultdict(list)
    for span in part.spans:
        shapes[span.queries, span.keys].append(span)
    for spans in shapes.values():
        queries = _places([span.query for span in spans])
        keys = queries if part.causal else _places([span.key for span in spans])
        yield _Batch(part.causal, queries, keys, len(spans))


def _places(runs: Sequence[slice]) -> Any:
    """Returns the packed tokens of all runs: a slice if the runs are adjacent, else an index."""
    if all(one.stop == other.start for one, other in zip(runs, runs[1:], strict=False)):
        return slice(runs[0].start, runs[-1].stop)
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


class _Gathered:
    """_Gathered computes a part on CUDA with one call of FlashAttention-2 (Dao, arXiv:2307.08691),
    which takes spans of different lengths: its queries and keys, one span after another.
    """

    def __init__(self, part: AttentionPart, where: torch.device):
        self.causal = part.causal
        self.queries, query_edges = _joined([span.query for span in part.spans], where)
        self.keys, key_edges = self.queries, query_edges
        if not part.causal:
            self.keys, key_edges = _joined([span.key for span in part.spans], where)
        longest_query = max(span.queries for span in part.spans)
        longest_key = max(span.keys for span in part.spans)
        lengths = (query_edges, key_edges, longest_query, longest_key)
        self._arguments = *lengths, 0.0, self.causal

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        out, sums, *seeds, _ = aten._flash_attention_forward(
            query, key, value, *self._arguments, False, scale=scale
        )
        return out, sums.T, tuple(seeds)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        attended: Tensor,
        denominator: Tensor,
        key: Tensor,
        value: Tensor,
        seeds: tuple[Tensor, ...],
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = (grad, query, key, value, attended, denominator.T.contiguous())
        pulls: tuple[Tensor, Tensor, Tensor] = aten._flash_attention_backward(
            *given, *self._arguments, *seeds, scale=scale
        )
        return pulls


def _joined(runs: Sequence[slice], where: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the indices in all runs, and the edges of the runs among them [runs + 1] int32."""
    index = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    lengths = torch.tensor([0, *(run.stop - run.start for run in runs)])
    edges = lengths.cumsum(0).to(torch.int32)
    return index.to(where, non_blocking=True), edges.to(where, non_blocking=True)
