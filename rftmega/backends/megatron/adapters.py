"""LoRA adapters on a frozen Megatron model: creates, loads and disables them, and merges them when
shards are read.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rftmega.backends.megatron.binding import Bound
from rftmega.config import COLUMNS_OF_A_SCALE, LoRA
from rftmega.converters import shard, shard_shape
from rftmega.converters.adapters import UP, AdaptedLayer, target_of
from rftmega.converters.rules import located
from rftmega.core.shards import Box, Shard, is_linear
from rftmega.models.hf.peft_folder import PEFTFolder, Whole
from rftmega.models.kernels.packed_weights import PackedWeight, pack
from rftmega.models.layers.adapter import (
    AdaptedExperts,
    AdaptedLinear,
    LowRankAdapter,
    let_gradients_begin,
)
from rftmega.models.layers.embedding_adapters import (
    EmbeddingAdapter,
    HeadAdapter,
    adapt_embedding,
    adapt_head,
)
from rftmega.runtime.parallel.topology import Topology

log = logging.getLogger(__name__)

# for each block of a tensor: this process's indices among the processes that hold the block
Replicas = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class AdapterDelta:
    """AdapterDelta is the delta that an adapter adds to a weight, in a form (`shards.Addend`) that
    is added when a shard of the weight is read.
    """

    adapter: LowRankAdapter

    @torch.no_grad()
    def of(self, box: Box) -> Tensor:
        rows, columns = (slice(*ends) for ends in box)
        return self.adapter.delta(rows, columns)


class Adapters:
    """Adapters holds the LoRA adapters on this process's part of a model.

    `bound` lists their matrices with conversion rules, like the model's weights; `replicas` lists,
    in the same order, the replica indices of each matrix: this process's indices among the
    processes that hold the same values (0: the first of them).
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        base: Sequence[tuple[Bound, Replicas]],
        layers: Sequence[AdaptedLayer],
        topology: Topology,
        options: LoRA,
    ):
        """Freezes all weights of the chunks, and adds adapters (zero matrices) to the weights in
        `base` that `layers` describe.

        `chunks`: this process's unwrapped pipeline chunks. `base`: each weight with its conversion
        rule and its replica indices (this process's indices among the processes with the same
        block). `options`: LoRA rank, scaling and dropout.
        """
        self.options, self.topology = options, topology
        self.targets = frozenset(target for layer in layers for target in layer.targets)
        self.bound: list[Bound] = []
        self.replicas: list[Replicas] = []
        self._on: dict[int, LowRankAdapter] = {}  # by the id of the weight
        for chunk in chunks:
            chunk.requires_grad_(False)
            if chunk.pre_process:
                let_gradients_begin(chunk.embedding)
        places: dict[int, tuple[Any, int]] = {
            id(weight): (module, number)
            for chunk in chunks
            for module in chunk.modules()
            if isinstance(module, AdaptedLinear | AdaptedExperts)
            for number, weight in enumerate(module.adaptable())
        }
        self._sequence_parallel: bool = chunks[0].config.sequence_parallel
        for chunk in chunks:
            if chunk.pre_process:
                embedding = chunk.embedding.word_embeddings
                places[id(embedding.weight)] = embedding, 0
            if chunk.post_process and hasattr(chunk, "output_layer"):
                places[id(chunk.output_layer.weight)] = chunk.output_layer, 0
        adapted = {id(layer.base): layer for layer in layers}
        for item, pieces in base:
            if layer := adapted.get(id(item.rule)):
                adapter = self._added(*places[id(item.parameter)], layer, item)
                self._bind(adapter, layer, item, pieces)

    def _added(self, module: Any, number: int, layer: AdaptedLayer, item: Bound) -> LowRankAdapter:
        """Creates an adapter for weight `number` of a module, attaches it and returns it.

        `layer` describes the adapter, `item` is the weight with its conversion rule.
        """
        options, topology = self.options, self.topology
        of_expert = item.expert is not None
        if layer.of_embedding:
            looked_up = EmbeddingAdapter(module, rank=options.rank, scaling=options.scaling)
            adapt_embedding(module, looked_up)
            self._on[id(item.parameter)] = looked_up
            return looked_up
        adapter = (HeadAdapter if layer.of_head else LowRankAdapter)(
            item.parameter,
            _members(layer, item),
            rank=options.rank,
            scaling=options.scaling,
            dropout=options.dropout,
            row_parallel=layer.row_parallel,
            sequence_parallel=self._sequence_parallel,
            of_expert=of_expert,
            group=topology.expert_tensor_group if of_expert else topology.tensor_group,
        )
        adapter.train(module.training)
        if isinstance(adapter, HeadAdapter):
            adapt_head(module, adapter)
        else:
            module.adapt(number, adapter)
        self._on[id(item.parameter)] = adapter
        return adapter

    def _bind(
        self, adapter: LowRankAdapter, layer: AdaptedLayer, item: Bound, pieces: Replicas
    ) -> None:
        """Appends the adapter's matrices, with their conversion rules from `layer`, to `bound` and
        `replicas`.

        `item`: the adapted weight. `pieces`: the replica indices of the weight.
        """
        topology = self.topology
        sharer = topology.tensor_rank if item.expert is None else topology.expert_tensor_rank
        whole: Replicas = [(stage, sharer, data) for stage, _, data in pieces]
        split = layer.row_parallel, not layer.row_parallel
        for rule, matrix, is_split in zip(
            (layer.down, layer.up), (adapter.a, adapter.b), split, strict=True
        ):
            place = (item.rank, item.ranks) if is_split else (0, 1)
            assert matrix.shape == shard_shape(rule, *place), (rule, matrix.shape)
            self.bound.append(Bound(rule, item.layer, item.expert, matrix, *place))
            self.replicas.append(pieces if is_split else whole)

    @torch.no_grad()
    def load(self, whole: Whole) -> None:
        """Fills this process's LoRA matrices with values from `whole(name, shape)`, which returns
        the matrix with this Hugging Face name.
        """
        for item in self.bound:
            self._fill(item, whole)

    def _fill(self, item: Bound, whole: Whole) -> None:
        parts = [
            whole(name, tensor.shape) if self.has_pair(name) else torch.zeros(tensor.shape)
            for name, tensor in zip(item.hf_names, item.rule.hf, strict=True)
        ]
        item.parameter.copy_(shard(item.rule, parts, item.rank, item.ranks))

    def has_pair(self, name: str) -> bool:
        """Returns whether the HF tensor `name` of an adapter belongs to a targeted module; the
        matrices of other HF tensors in the same weight are zeros.
        """
        return target_of(name) in self.targets

    def is_filler(self, name: str) -> bool:
        """Returns whether the HF tensor `name` of an adapter is filler: the zero B matrix of a
        module that is not targeted, but part of the same weight as a targeted module.
        """
        return name.endswith(UP) and not self.has_pair(name)

    def merged(self, item: Bound) -> Shard:
        """Returns the shard of the model weight `item` with its adapter's delta, which is added
        when the shard is read; the weight stays unchanged.
        """
        held, adapter = item.shard(), self._on.get(id(item.parameter))
        if adapter is None:
            return held
        return Shard(held.logical, held.parts, held.tensor, AdapterDelta(adapter))

    def shards(self) -> list[Shard]:
        """Returns this process's shards of the LoRA matrices: tensors with the blocks of Hugging
        Face tensors that they hold.
        """
        return [item.shard() for item in self.bound]

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Disables the adapters within a `with` block."""
        for adapter in self._on.values():
            adapter.off = True
        try:
            yield
        finally:
            for adapter in self._on.values():
                adapter.off = False

    swapped_in = (
        switched_off  # for the reference of a policy: `device.held_weights.ReferenceWeights`
    )


def _members(layer: AdaptedLayer, item: Bound) -> Tensor:
    """Returns [rows, pairs]: 1 where a row of this process's weight `item` belongs to a LoRA pair,
    else 0.

    A fused weight such as qkv has several pairs; `layer` names the parts that have one.
    """
    if layer.row_parallel:
        return torch.ones(len(item.parameter), 1)
    found = torch.zeros(len(item.parameter), len(layer.parts))
    for (part, start, stop), offset in located(item.rule, item.rank, item.ranks):
        if part in layer.parts:
            found[offset : offset + stop - start, layer.parts.index(part)] = 1
    return found


def counted_once(base: Sequence[tuple[Bound, Replicas]]) -> Iterator[Shard]:
    """Yields shards of the exported weights in `base`, such that each element of the model is
    yielded on one process only.

    `base`: this process's weights with their replica indices; the process that has index 0
    everywhere yields the weight.
    """
    for item, pieces in base:
        if item.rule.exported and not any(any(piece) for piece in pieces):
            yield item.shard()


def compare_copies(item: Bound, folder: PEFTFolder) -> None:
    """Compares this process's part of a frozen weight with the copy of it that PEFT saved in the
    adapter folder `folder`, if there is one; `PEFTFolder.compare` records a difference.
    """
    (first, *_), held = item.rule.hf, item.parameter.detach()

    def is_held(copy: Tensor) -> bool:
        return torch.equal(shard(item.rule, [copy], item.rank, item.ranks).to(held), held)

    if len(item.rule.hf) == 1:  # as of embedding and LM head
        folder.compare(item.hf_names[0], first.shape, is_held)


def pack_base(base: Sequence[Bound]) -> list[PackedWeight]:
    """Quantises the linear layers among the frozen weights `base` to int8 for their copy on the
    host, logs the quantisation error, and returns the packed weights.
    """
    weights = [item.parameter.detach() for item in base if all(map(is_linear, item.hf_names))]
    packed, error = pack(weights, wide=COLUMNS_OF_A_SCALE)
    if dist.get_rank() == 0:
        log.info(
            "model.lora.base_on_host=int8: %d linear layers take %.2f GB of the host instead of %.2f; they are rounded by "
            "%.2f %% (root mean square).",
            len(packed),
            sum(each.nbytes for each in packed) / 1e9,
            sum(weight.nbytes for weight in weights) / 1e9,
            100 * error,
        )
    return packed
