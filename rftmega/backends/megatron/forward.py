"""Packs rows into one sequence, runs the model, and unpacks a result per token; padding is not
computed.
`custom_forward` is the only forward pass of the Megatron backend: actor and critic run it through
Megatron's pipeline schedule.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rftmega.core.shared_prefixes import RowSegment, SharedTokens, SortedRows
from rftmega.core.teacher_scores import TeacherRequest
from rftmega.data.media.model_inputs import ImageTensors, image_tensors
from rftmega.data.media.waveform_inputs import WaveformTensors
from rftmega.models.kernels.chunked_head import Head
from rftmega.models.kernels.linear_log_probs import VocabularyShard, linear_stats
from rftmega.models.kernels.teacher_terms import TaughtTokens, teacher_numbers, teacher_terms
from rftmega.models.kernels.tree_attention import SegmentTree
from rftmega.models.layers.embedding_adapters import pair_of_head
from rftmega.models.layers.rotary import MultimodalRotary, PackedRotary
from rftmega.models.layers.router_replay import RouteInputs
from rftmega.runtime.parallel.topology import tensor_and_context

LogitsProcessor = Callable[..., dict[str, Tensor]]


@runtime_checkable
class HiddenProcessor(Protocol):
    """HiddenProcessor is a logits processor that gets hidden states and the LM head's weight
    instead of logits.
    """

    def from_hidden(
        self,
        hidden: Tensor,
        weight: Tensor,
        *,
        temperature: float | Tensor,
        tensor_group: Any,
        pair: tuple[Tensor, Tensor] | None,
        **arguments: Any,
    ) -> dict[str, Tensor]:
        """Returns named tensors [N], computed from `hidden` [N, H] and `weight` [V, H], this
        process's rows of the LM head.

        `temperature`: divisor of the logits, one number or [N]. `tensor_group`: the tensor-parallel
        group over which the vocabulary is split. `pair`: the factors of an adapter on the LM head,
        as `linear_stats` takes them. `arguments`: the packed `logits_processor_args` of
        `custom_forward`, [N] each, and `slots`: each token's place in the padded grid.
        """


@dataclass(frozen=True, slots=True)
class LogProbs:
    """LogProbs computes the log-prob of the token ids `targets` and the entropy of the sampling
    distribution, without materialising the logits; with teachers also the divergence from each.
    """

    vocabulary: int
    taught: Sequence[TaughtTokens] = ()  # the scores of each teacher

    def from_hidden(
        self,
        hidden: Tensor,
        weight: Tensor,
        *,
        temperature: float | Tensor,
        tensor_group: Any,
        pair: tuple[Tensor, Tensor] | None,
        **arguments: Any,
    ) -> dict[str, Tensor]:
        targets, slots = arguments["targets"], arguments["slots"]
        shard = _shard_of(weight, self.vocabulary, tensor_group)
        logp, entropy = linear_stats(hidden, weight, targets, temperature, shard, pair=pair)
        found = {"logp": logp, "entropy": entropy}
        if self.taught:
            head = Head(weight, pair=pair)
            found["divergence"] = teacher_terms(
                self.taught, hidden, head, logp, slots, temperature, shard
            )
        return found


@dataclass(frozen=True, slots=True)
class TeacherNumbers:
    """TeacherNumbers computes the numbers that a teacher is asked for."""

    asked: TeacherRequest
    vocabulary: int

    def from_hidden(
        self,
        hidden: Tensor,
        weight: Tensor,
        *,
        temperature: float | Tensor,
        tensor_group: Any,
        pair: tuple[Tensor, Tensor] | None,
        **arguments: Any,
    ) -> dict[str, Tensor]:
        shard = _shard_of(weight, self.vocabulary, tensor_group)
        head = Head(weight, pair=pair)
        return teacher_numbers(self.asked, hidden, head, arguments["targets"], temperature, shard)


def _shard_of(weight: Tensor, vocabulary: int, tensor_group: Any) -> VocabularyShard:
    """Returns the range of the vocabulary in this process's rows of the LM head."""
    rank = dist.get_rank(tensor_group)
    return VocabularyShard.of_rank(
        len(weight), vocabulary=vocabulary, rank=rank, group=tensor_group
    )


@dataclass(frozen=True, slots=True)
class Packing:
    """Packing maps each packed token slot of this process to its row and column in a padded grid.
    Filler slots make the length divisible; they map to row `rows`, column 0.
    """

    slots: Tensor  # [N] index into the flat [rows * columns] grid; rows * columns for filler
    slots_on_host: Tensor  # the same on the host, to index host tensors without a device sync
    positions: Tensor  # [1, N], starting at 0 in every row
    whole: Tensor  # slots of all context-parallel processes, row by row, on the host
    sequence: PackedSeqParams
    rows: int
    columns: int
    context_group: Any  # None without context parallelism
    # context-parallel rank and size
    context: tuple[int, int] = (0, 1)
    # the slots that rows share, on the host;
    # None: each token has its own slot.
    shared: SharedTokens | None = None

    def take(self, grid: Tensor, chosen: "ChosenTokens | None" = None) -> Tensor:
        """Packs `grid` [rows, columns], or one value per row [rows], into [N], the values of this
        process's slots, or of the `chosen` tokens, on the model's device.

        Filler slots get 0, or 1 for values per row.
        """
        slots: Packing | ChosenTokens = chosen or self
        if grid.dim() == 1:
            grid = grid[:, None].expand(-1, self.columns)
            filler = grid.new_ones(1)
        else:
            filler = grid.new_zeros(1)
        flat = torch.cat([grid.reshape(-1), filler])
        if flat.device == self.slots.device:
            return flat[slots.slots]
        return flat[slots.slots_on_host].to(self.slots.device, non_blocking=True)

    def take_vectors(self, grid: Tensor, *, whole: bool = False, fill: int = 0) -> Tensor:
        """Packs `grid` [rows, columns, ...] on the host into [N, ...] on the device; filler slots
        get `fill`.

        `whole`: pack for the slots of all context-parallel processes instead of this process's
        slots.
        """
        flat = torch.cat([grid.flatten(0, 1), grid.new_full((1, *grid.shape[2:]), fill)])
        slots = self.whole if whole else self.slots_on_host
        return flat[slots].to(self.slots.device, non_blocking=True)

    def selected(self, needed: Tensor | None) -> "ChosenTokens | None":
        """Returns the tokens of this process's slots for which the LM head is computed; None stands
        for all slots, in their order.

        `needed` [rows, columns] on the host marks these tokens. A slot that several rows share
        occurs once for each row. If no token is marked, the result is the first slot, whose value
        goes to filler: every process must run the LM head, since its forward and backward passes
        are collectives. `needed` None: all tokens are computed, and tokens of different rows that
        have the same prediction occur once.
        """
        if self.shared is not None and needed is None:
            places, slots, present, copies = self.shared.predictions(self.columns)
            where = self.slots.device
            places, there, copies, present = (
                index.to(where, non_blocking=True) for index in (places, slots, copies, present)
            )
            return ChosenTokens(places, there, slots, (copies, present))
        if needed is None:
            return None
        if self.shared is not None:
            slots = ((self.shared.places >= 0) & needed.reshape(-1)).nonzero()[:, 0]
            places = self.shared.places[slots]
        else:
            marks = torch.cat([needed.reshape(-1), needed.new_zeros(1)])
            places = marks[self.slots_on_host].nonzero()[:, 0]
            slots = self.slots_on_host[places]
        if not len(places):
            places, slots = places.new_zeros(1), slots.new_full((1,), self.rows * self.columns)
        where = self.slots.device
        return ChosenTokens(
            places.to(where, non_blocking=True), slots.to(where, non_blocking=True), slots
        )

    def put(self, values: Tensor, slots: Tensor | None = None) -> Tensor:
        """Unpacks `values` [N, ...] of this process's slots into [rows, columns, ...], with 0 where
        there is no token; every context-parallel process gets the whole rows. `slots`: index in the
        grid of each value; None: values are of all slots.

        Differentiable. Since all context-parallel processes then compute the same loss, only one of
        them may count it.
        """
        size = self.rows * self.columns
        canvas = values.new_zeros(size + 1, *values.shape[1:])  # the last element takes the filler
        slots = self.slots if slots is None else slots
        grid = canvas.index_put((slots,), values)[:size].unflatten(0, (self.rows, self.columns))
        return grid if self.context_group is None else _Everyones.apply(grid, self.context_group)

    def put_chosen(self, values: Tensor, chosen: "ChosenTokens | None") -> Tensor:
        """Unpacks `values` [n, ...] of the tokens `chosen` (None: all slots), as `put` does."""
        if chosen is None:
            return self.put(values)
        if chosen.copies is None:
            return self.put(values, chosen.slots)
        copied, slots = chosen.copies
        return self.put(values[copied], slots)


class ChosenTokens(NamedTuple):
    """ChosenTokens are tokens of a grid with the packed slots in which they are computed."""

    places: Tensor  # [n] index among this process's slots
    slots: Tensor  # [n] index in the flat grid
    slots_on_host: Tensor
    # of all m tokens: index [m] among the n whose results they have, and in the flat grid [m]
    copies: tuple[Tensor, Tensor] | None = None


class _Everyones(torch.autograd.Function):
    """_Everyones sums a tensor over the context-parallel processes; the backward pass returns each
    process's own gradient unchanged, since all compute the same loss.
    """

    @staticmethod
    def forward(ctx: Any, grid: Tensor, group: Any) -> Tensor:
        total = grid.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def pack(
    mask: Tensor,
    *,
    tensor_multiple: int = 1,
    context_rank: int = 0,
    context: int = 1,
    context_group: Any = None,
    row_length: int | None = None,
    total_length: int | None = None,
    where: torch.device,
) -> Packing:
    """Packs the True positions of `mask` [rows, columns] (on the host) row by row; an empty batch
    consists of filler only.

    Every row is padded to a multiple of 2 x `context`, and process `context_rank` of the `context`
    processes in `context_group` takes its two zig-zag chunks; the number of tokens of a process is
    divisible by `tensor_multiple` (see `token_multiple`). `row_length` pads every row to this
    length, `total_length` pads the whole sequence. Index tensors are sent to device `where`. Raises
    ValueError if one of these two lengths is too short.
    """
    rows, columns = mask.shape
    unit = 2 * context if context > 1 else 1
    counts = mask.sum(1)
    longest = int(counts.max()) if rows else 0
    if row_length is not None and longest > row_length:
        raise ValueError(f"A row has {longest} tokens; it can't be padded to {row_length}.")
    lengths = (
        -(-counts // unit) * unit
        if row_length is None
        else torch.full_like(counts, -(-row_length // unit) * unit)
    )
    lengths = lengths[counts > 0] if row_length is None else lengths
    total = int(lengths.sum())
    multiple = math.lcm(unit, context * tensor_multiple)
    filler = -total % multiple if total else multiple
    if total_length is not None:
        if total_length % multiple or total_length < total + filler:
            raise ValueError(
                f"{total + filler} packed tokens can't be padded to {total_length}, a multiple of {multiple}."
            )
        filler = total_length - total
    lengths = torch.cat([lengths, lengths.new_tensor([filler] if filler else [])])
    edges = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    length_of = lengths.repeat_interleave(lengths)
    position = torch.arange(int(edges[-1])) - edges[:-1].repeat_interleave(lengths)
    slots = torch.full_like(position, rows * columns)
    source = mask.flatten().nonzero()[:, 0]
    present = torch.arange(rows)[counts > 0] if row_length is None else torch.arange(rows)
    begin = counts.new_zeros(rows).index_put((present,), edges[: len(present)])
    first = counts.cumsum(0) - counts  # of each row among all tokens
    row = source // max(columns, 1)
    slots[begin[row] + torch.arange(len(source)) - first[row]] = source
    whole = slots
    if context > 1:
        chunk = position * (2 * context) // length_of
        mine = (chunk == context_rank) | (chunk == 2 * context - 1 - context_rank)
        slots, position = slots[mine], position[mine]
    cumulative = edges.to(torch.int32).to(where, non_blocking=True)
    longest = int(lengths.max())
    sequence = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    sequence.edges = edges.tolist()  # for our own attention, without a device sync
    return Packing(
        slots=slots.to(where, non_blocking=True),
        slots_on_host=slots,
        positions=position[None].to(where, non_blocking=True),
        whole=whole,
        sequence=sequence,
        rows=rows,
        columns=columns,
        context_group=context_group if context > 1 else None,
        context=(context_rank, context),
    )


def pack_shared(
    mask: Tensor, sorted_rows: SortedRows, *, tensor_multiple: int = 1, where: torch.device
) -> Packing:
    """Packs the True positions of `mask` [rows, columns] (on the host), which begin at column 0,
    with one slot for a token that several rows share, as `sorted_rows` says.

    The number of slots is divisible by `tensor_multiple` (see `token_multiple`). Index tensors are
    sent to device `where`.
    """
    rows, columns = mask.shape
    found = sorted_rows.packed(columns)
    filler = -len(found.slots) % tensor_multiple
    slots = torch.cat([found.slots, found.slots.new_full((filler,), rows * columns)])
    position = slots % columns
    position[len(found.slots) :] = torch.arange(filler)
    segments = found.segments
    if filler:
        segments = (*segments, RowSegment(len(found.slots), len(slots), len(slots), 0, -1))
    tree = SegmentTree(segments)
    edges = [0, *(segment.stop for segment in segments)]
    cumulative = torch.tensor(edges, dtype=torch.int32).to(where, non_blocking=True)
    sequence = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=tree.longest,
        max_seqlen_kv=tree.longest,
    )
    sequence.tree = tree
    return Packing(
        slots=slots.to(where, non_blocking=True),
        slots_on_host=slots,
        positions=position[None].to(where, non_blocking=True),
        whole=slots,
        sequence=sequence,
        rows=rows,
        columns=columns,
        context_group=None,
        shared=found,
    )


def token_multiple(config: TransformerConfig) -> int:
    """Returns the number by which a process's token count must be divisible, because of sequence
    parallelism and FP8 matmuls.
    """
    sharers = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return math.lcm(sharers, get_fp8_align_size(config.fp8_recipe) if config.fp8 else 1)


def packed_length(counts: Sequence[int], *, tensor_multiple: int = 1, context: int = 1) -> int:
    """Returns the number of slots, filler included, into which `pack` packs rows of `counts`
    tokens, summed over the `context` context-parallel processes; `tensor_multiple` as for `pack`.
    """
    unit = 2 * context if context > 1 else 1
    multiple = math.lcm(unit, context * tensor_multiple)
    return max(-(-sum(-(-n // unit) * unit for n in counts) // multiple), 1) * multiple


def custom_forward(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor | None,
    sequence_parallel: bool,
    value_model: bool = False,
    pack_seqs: bool = True,
    logits_processor: LogitsProcessor | HiddenProcessor | None = None,
    logits_processor_args: dict[str, Tensor] | None = None,
    temperature: float | Tensor = 1.0,
    max_batch_seqlen: int | None = 4096,
    padding_seqlen: int | None = None,
    images: ImageTensors | WaveformTensors | None = None,
    routes: RouteInputs | None = None,
    needed: Tensor | None = None,
    sorted_rows: SortedRows | None = None,
) -> Any:
    """Runs one pipeline chunk over the tokens of `input_ids` [B, S] that `attention_mask` [B, S]
    marks, which may be at any columns.
    All stages but the last return the hidden states that the schedule sends on. The last stage
    returns, with 0 outside the mask: with `value_model` the values [B, S]; with a
    `logits_processor` its dict of [B, S]; otherwise this process's columns of the logits [B, S, V /
    TP], divided by `temperature` (one number, or [B]).
    A processor is called with (logits [N, V / TP], **args), where `logits_processor_args` ([B, S]
    each) are packed to [N]. A processor with a method `from_hidden` (see HiddenProcessor) gets
    hidden states and the LM head's weight instead, and no logits are materialised.
    `pack_seqs=False` pads every row to the longest. `padding_seqlen` pads the packed tokens to a
    fixed number. Tensors may be on the host. `position_ids`, if given, must count from 0 in every
    row. `images`: for a model with a vision or audio encoder; the rows then begin at column 0.
    `routes`: the experts that the tokens are sent to, in a chunk that `router_replay.install`
    prepared. `needed` [B, S] on the host: the tokens that a processor with `from_hidden` computes;
    the results of all others are 0. `sorted_rows`: the rows, which begin at column 0, share the
    computation of common beginnings, without context parallelism and logits; None: they don't.
    Raises ValueError for more than `max_batch_seqlen` tokens, for other positions, and if the model
    was built with another `sequence_parallel`.
    """
    chunk: GPTModel = unwrap(model)
    config = chunk.config
    if sequence_parallel != config.sequence_parallel:
        raise ValueError(
            f"sequence_parallel={sequence_parallel}, but the model was built with {config.sequence_parallel}."
        )
    mask = attention_mask.bool().cpu()
    if max_batch_seqlen is not None and (tokens := int(mask.sum())) > max_batch_seqlen:
        raise ValueError(
            f"{tokens} tokens are more than max_batch_seqlen={max_batch_seqlen}. Make smaller micro-batches."
        )
    if position_ids is not None and not torch.equal(
        position_ids.cpu()[mask], (mask.cumsum(1) - 1)[mask]
    ):
        raise ValueError(
            "position_ids must count from 0 in every row; rotary embeddings of packed rows know nothing else."
        )
    no_logits = value_model or isinstance(logits_processor, HiddenProcessor)
    if sorted_rows is not None and not no_logits:
        raise ValueError(
            "Rows that share tokens have no logits of their own; leave sorted_rows out."
        )
    packing = _packing_of(
        mask, chunk, sorted_rows, whole_rows=not pack_seqs, total_length=padding_seqlen
    )
    ids = packing.take(input_ids)[None]
    tensor_group, _ = tensor_and_context()
    with _routed(packing, routes, _seen_by_routers(packing, chunk, tensor_group)):
        output = _run(model, chunk, ids, packing, images, hidden_only=no_logits)
    if not chunk.post_process:
        return output
    if value_model:
        chosen = packing.selected(None)
        return packing.put_chosen(_at(chunk.value_head(output), chosen), chosen)
    chosen = packing.selected(needed) if no_logits else None
    arguments = {
        name: packing.take(value, chosen) for name, value in (logits_processor_args or {}).items()
    }
    if isinstance(temperature, Tensor):
        temperature = packing.take(temperature, chosen)
    temperature = temperature / vars(chunk)["logits_factor"]
    if isinstance(logits_processor, HiddenProcessor):
        hidden, pair = _for_output_layer(output, chunk, tensor_group), pair_of_head(chunk, output)
        processed = logits_processor.from_hidden(
            _at(hidden, chosen),
            _output_weight(model, chunk),
            temperature=temperature,
            tensor_group=tensor_group,
            pair=pair and (_at(pair[0], chosen), pair[1]),
            slots=(chosen or packing).slots,
            **arguments,
        )
        return {name: packing.put_chosen(value, chosen) for name, value in processed.items()}
    logits = output[0] / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    if logits_processor is None:
        return packing.put(logits)
    return {
        name: packing.put(value) for name, value in logits_processor(logits, **arguments).items()
    }


def _packing_of(
    mask: Tensor,
    chunk: GPTModel,
    sorted_rows: SortedRows | None,
    *,
    whole_rows: bool,
    total_length: int | None,
) -> Packing:
    """Packs the True positions of `mask` for this process of a pipeline chunk. `sorted_rows`: see
    `custom_forward`; `whole_rows`: pad every row to the longest; `total_length`: see `pack`.
    """
    config, where = chunk.config, next(chunk.parameters()).device
    multiple = token_multiple(config)
    if sorted_rows is not None:
        return pack_shared(mask, sorted_rows, tensor_multiple=multiple, where=where)
    _, context_group = tensor_and_context()
    return pack(
        mask,
        tensor_multiple=multiple,
        context_rank=dist.get_rank(context_group),
        context=config.context_parallel_size,
        context_group=context_group,
        row_length=int(mask.sum(1).max()) if whole_rows else None,
        total_length=total_length,
        where=where,
    )


def _at(values: Tensor, chosen: ChosenTokens | None) -> Tensor:
    """Returns the values [n, ...] of the chosen tokens among those of all slots [N, ...]."""
    return values if chosen is None else values.index_select(0, chosen.places)


def _seen_by_routers(packing: Packing, chunk: GPTModel, tensor_group: Any) -> slice:
    """Returns the range of this process's packed slots whose tokens its MoE routers process: all
    slots, or under sequence parallelism this rank's share of them.
    """
    size = len(packing.slots_on_host)
    if not chunk.config.sequence_parallel:
        return slice(0, size)
    each = size // dist.get_world_size(tensor_group)
    rank = dist.get_rank(tensor_group)
    return slice(rank * each, (rank + 1) * each)


@contextmanager
def _routed(packing: Packing, routes: RouteInputs | None, own: slice) -> Iterator[None]:
    """Makes the MoE layers, within a `with` block, use the expert choices of `routes`, or record
    their own choices in `routes` if none are given.

    `own`: range of the packed slots whose tokens this process's routers process. `routes` None:
    nothing is replayed or recorded.
    """
    if routes is None:
        yield
        return
    packed = routes.packed(packing.take_vectors, packing.slots_on_host, own)
    packing.sequence.routes = packed
    yield
    routes.note(packed, packing.slots_on_host, own, packing.rows * packing.columns)


def unwrap(model: Any) -> Any:
    """Returns the model inside its data-parallel wrappers, if it has any."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _run(
    model: Any,
    chunk: GPTModel,
    ids: Tensor,
    packing: Packing,
    images: ImageTensors | WaveformTensors | None,
    *,
    hidden_only: bool,
) -> Tensor:
    """Runs the pipeline chunk on the packed token ids `ids` [1, N]; returns its hidden states [N,
    1, H], or on the last stage without `hidden_only` the logits [1, N, V / TP].
    """
    rotary = getattr(chunk, "rotary_pos_emb", None)
    rank, ranks = packing.context
    if isinstance(rotary, MultimodalRotary):
        if not isinstance(images, ImageTensors):
            images = image_tensors(None, packing.rows, packing.columns, merge=1, load=None)
        positions = packing.take_vectors(
            images.positions, whole=rotary.by_rows and packing.shared is None
        )
        rotary.next(packing.sequence, positions, rank=rank, ranks=ranks)
    elif isinstance(rotary, PackedRotary):
        rotary.next(packing.sequence, packing.positions[0], rank=rank, ranks=ranks)
    for each in vars(chunk).get("latent_rotaries", ()):
        each.next(packing.sequence, packing.positions[0], rank=rank, ranks=ranks)
    seen: dict[str, Tensor] = {}
    if chunk.pre_process and images is not None and images.inputs:
        seen["features"] = packing.take(images.features)
        for name, given in images.inputs.items():
            seen[name] = given.to(packing.slots.device, non_blocking=True)
    kept = chunk.post_process
    chunk.post_process = kept and not hidden_only
    try:
        return model(ids, packing.positions, None, packed_seq_params=packing.sequence, **seen)
    finally:
        chunk.post_process = kept


def _for_output_layer(hidden: Tensor, chunk: GPTModel, tensor_group: Any) -> Tensor:
    """Returns hidden states [N, H] as inputs of the LM head; the backward pass sums their gradients
    over the tensor-parallel processes.
    """
    if chunk.config.sequence_parallel:
        return gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=tensor_group
        )[:, 0]
    return copy_to_tensor_model_parallel_region(hidden, group=tensor_group)[:, 0]


def output_weight(chunk: GPTModel) -> Tensor:
    """Returns the weight of the LM head of the last pipeline chunk."""
    found: Tensor = (
        chunk.shared_embedding_or_output_weight()
        if chunk.share_embeddings_and_output_weights
        else chunk.output_layer.weight
    )
    return found


def _output_weight(model: Any, chunk: GPTModel) -> Tensor:
    weight = output_weight(chunk)
    # The output layer's own forward is not called: its hook would wait for a pending gather.
    if model is not chunk and weight.requires_grad and model.ddp_config.overlap_param_gather:
        model.param_to_bucket_group[weight].finish_param_sync()
    return weight
