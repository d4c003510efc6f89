"""LoRA adapters on a frozen FSDP2 model: creates, loads and disables them, and merges them when
shards are read; `adapted_experts` contains those on experts.
LoRA matrices are ordinary parameters: FSDP2 shards their rows, and tensor-parallel processes split
them like the layer. B has the same rows as the weight on every process, so merging lacks only rows
of A, which are gathered before weights are read; for an embedding, whose A has one column per
vocabulary entry, both matrices are gathered.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rftmega.backends.decoder.adapted_layers import WEIGHT, adapted_of, pair_of
from rftmega.backends.decoder.parameter_places import Placed
from rftmega.backends.decoder.tensor_plan import Split
from rftmega.backends.fsdp.adapted_experts import AdaptedStack
from rftmega.backends.fsdp.mesh import ShardingMesh
from rftmega.backends.fsdp.module import LogProbHead, Network
from rftmega.backends.fsdp.parameter_rows import Weight
from rftmega.config import LoRA
from rftmega.core.errors import ConfigError
from rftmega.core.shards import Box, Shard, narrowed
from rftmega.model_providers.backend_support import advice
from rftmega.models.hf.peft_folder import PEFTFolder, Whole
from rftmega.models.lora.embedding import EmbeddingWithPair
from rftmega.models.lora.linear import LinearWithPair, PairDelta

Places = dict[str, list[Placed]]


class ShardedAdapters:
    """ShardedAdapters holds this process's rows of all LoRA matrices of a model."""

    def __init__(
        self, network: Network, model: PreTrainedModel, options: LoRA, placement: ShardingMesh
    ):
        """Adds LoRA pairs to the linear layers, embeddings and experts that the options target.
        `network` contains the modules of `model`, which are on the meta device; so are the new
        matrices. Raises ConfigError if no layer matches.
        """
        self.options, self.placement, self._config = options, placement, model.config
        self.layers: dict[str, LinearWithPair | EmbeddingWithPair] = {}
        self.stacks: dict[str, AdaptedStack] = {}
        head = network.head if isinstance(network.head, LogProbHead) else None
        found = adapted_of(model, options.targets, value=head is None)
        self.targets = found.targets
        for name, plain in found.linears.items():
            self.layers[name] = LinearWithPair(plain, options)
        for name, table in found.embeddings.items():
            self.layers[name] = EmbeddingWithPair(table, options)
        for name, layer in self.layers.items():
            model.set_submodule(name, layer)
        if head is not None:
            head.linear = cast(nn.Linear, model.get_output_embeddings())
        for name, parts in found.stacks.items():
            self.stacks[name] = AdaptedStack(model, name, parts, found.targets, options)
        if self.stacks:
            model.set_experts_implementation("eager")  # one expert at a time, as pairs need it
        self.weights: list[Weight] = []  # A and B of each layer, one after the other
        self._deltas: dict[str, PairDelta] = {}  # by layer name
        self._gathered: list[tuple[Weight, Tensor]] = []  # rows of a matrix, and the whole matrix

    def train(self, learning: bool) -> None:
        """Switches the adapters to training (`learning`), where dropout applies, or to scoring."""
        for layer in self.layers.values():
            layer.training = learning
        for stack in self.stacks.values():
            stack.train(learning)

    def places(self, places: Places) -> Places:
        """Returns the positions of the LoRA matrices' Hugging Face tensors in their parameters,
        derived from the positions `places` of the weights' tensors.
        Raises ConfigError for a layer that the folder stores as several tensors.
        """
        found: Places = {}
        for name, layer in self.layers.items():
            weight = name + WEIGHT
            if (number := len(places[weight])) > 1:
                raise ConfigError(
                    f"model.lora.targets: {weight} is {number} tensors of the folder, and can't have an adapter under "
                    f"backend=fsdp. {advice(self._config, 'Leave it out of the targets')}"
                )
            (place,) = places[weight]
            if place.piece is not None:
                raise ConfigError(
                    f"model.lora.targets: {weight} is a part of {place.name} in the folder, and can't have an adapter of its own "
                    f"under backend=fsdp. {advice(self._config, 'Save the folder with save_original_format=False')}"
                )
            pairs = zip(pair_of(weight), pair_of(place.name), layer.pair, strict=True)
            for known, hf_name, matrix in pairs:
                found[known] = [Placed(hf_name, tuple(matrix.shape), None, (0, 0))]
        for name, stack in self.stacks.items():
            found |= stack.places(places[name])
        return found

    def named(self, names: Mapping[str, str]) -> dict[str, str]:
        """Returns a dict from the network's names of the LoRA matrices to transformers' names.

        `names`: the same mapping for the weights: the network's parameter name -> transformers'
        name.
        """
        found: dict[str, str] = {}
        for own, name in names.items():
            if name.removesuffix(WEIGHT) in self.layers:
                found |= zip(pair_of(own), pair_of(name), strict=True)
            if stack := self.stacks.get(name):
                theirs = stack.names()
                for part, ours in stack.names(own.rpartition(".")[0]).items():
                    found |= zip(ours, theirs[part], strict=True)
        return found

    def share(self, splits: dict[str, Split], partial: set[str]) -> None:
        """Adds the tensor-parallel splits of the LoRA matrices to `splits` (parameter name ->
        Split), and the names of replicated matrices to `partial`.

        Of each pair, the matrix that has the weight's split dimension is split like the weight. The
        other matrix is replicated; its gradient on a process is partial, so it must be summed.
        """
        for name, layer in self.layers.items():
            weight = name + WEIGHT
            down, up = pair_of(weight)
            if isinstance(layer, EmbeddingWithPair):  # the vocabulary is the columns of A
                if weight in splits:
                    splits[down] = replace(splits[weight], dim=1)
                    partial.add(up)
            elif weight in splits:
                split = splits[weight]
                own, whole = (up, down) if split.dim == 0 else (down, up)
                splits[own] = split
                partial.add(whole)
                if split.dim:
                    layer.columns = slice(*split.slices[0])
            elif weight in partial:
                partial |= {down, up}
        for name, stack in self.stacks.items():
            if name in splits:
                stack.share(splits[name], splits, partial)

    def freeze(self, network: nn.Module, dtype: torch.dtype, *, beside: Iterable[Tensor]) -> None:
        """Freezes all parameters except the LoRA matrices and the parameters in `beside`; frozen
        parameters are cast to `dtype`, that of the forward pass.
        """
        learn = {id(matrix) for layer in self.layers.values() for matrix in layer.pair}
        learn |= {id(matrix) for stack in self.stacks.values() for matrix in stack.matrices()}
        learn |= set(map(id, beside))
        for parameter in network.parameters():
            if id(parameter) not in learn:
                parameter.requires_grad_(False)
                parameter.data = parameter.data.to(dtype)

    def bind(self, weights: Sequence[Weight]) -> None:
        """Stores this process's Weights of the LoRA matrices, taken from `weights` (all trained
        Weights of the model); to be called after their memory was allocated.
        """
        known = {weight.name: weight for weight in weights}
        for name, layer in self.layers.items():
            down, up = (known[each] for each in pair_of(name + WEIGHT))
            self.weights += (down, up)
            a, b = self._whole(down), up.pushed
            if isinstance(layer, EmbeddingWithPair):  # transposed, from its vocabulary rows on
                first = self.placement.first_row(len(layer.weight))
                a, b = self._whole(up).T, a[:, first:].T
            self._deltas[name] = PairDelta(a, b, self.options.scaling)
        for stack in self.stacks.values():
            self.weights += stack.bind(known)

    def _whole(self, weight: Weight) -> Tensor:
        """Returns a new buffer, zeros at first, for all rows of a LoRA matrix; `gather` fills it
        from the rows of all processes.
        """
        whole = weight.pushed.new_zeros(len(weight.parameter), weight.pushed.shape[1])
        self._gathered.append((weight, whole))
        return whole

    @property
    def gathered(self) -> list[Tensor]:
        """Returns the matrices that `gather` has filled: A of each linear layer, with this
        process's columns, and both matrices of an embedding's pair.
        """
        return [whole for _, whole in self._gathered]

    @torch.no_grad()
    def load(self, whole: Whole) -> None:
        """Fills this process's rows of the LoRA matrices with values from `whole(name, shape)`,
        which returns the matrix with this Hugging Face name.
        """
        for weight in self.weights:
            for plan in weight.plans:
                shard = plan.of(weight.rows)
                (name,), (shape,) = shard.logical.names, shard.logical.shapes
                matrix = whole(name, shape)
                for box, elements in shard.views(0):
                    elements.copy_(matrix[tuple(slice(*ends) for ends in box)])

    @torch.no_grad()
    def gather(self, where: torch.device) -> None:
        """Gathers the rows of LoRA matrices that `merged` needs; a collective over the processes of
        a replica, on device `where`.
        Experts need no gathering: a process holds the pairs of its experts.
        """
        if not self._gathered:
            return
        shards = self.placement.shards
        padded = []
        for weight, whole in self._gathered:
            lacking = -(-len(whole) // shards) - len(weight.pushed)
            padded.append(functional.pad(weight.pushed, (0, 0, 0, lacking)).flatten())
        own = torch.cat(padded).to(where)
        everyones = own.new_empty(shards * len(own))
        dist.all_gather_into_tensor(everyones, own, group=self.placement.shard_group)
        by_matrix = everyones.view(shards, -1).split([len(each) for each in padded], 1)
        for matrix, blocks in zip(self.gathered, by_matrix, strict=True):
            matrix.copy_(blocks.reshape(-1, matrix.shape[1])[: len(matrix)])

    def merged(self, weight: Weight) -> list[Shard]:
        """Returns the shards of a model weight with its adapter's delta, which is added when a
        shard is read; the weight stays unchanged.
        """
        if stack := self.stacks.get(weight.name):
            rows = weight.pushed.shape[1]
            held = [(plan.of(weight.pushed), plan.index) for plan in weight.plans]
            return [replace(shard, addend=stack.delta(index or 0, rows)) for shard, index in held]
        delta = self._deltas.get(weight.name.removesuffix(WEIGHT))
        if delta is None:
            return weight.shards()
        return [replace(shard, addend=delta) for shard in weight.shards()]

    def shards(self) -> list[Shard]:
        """Returns this process's shards of the LoRA matrices: tensors with the blocks of Hugging
        Face tensors that they hold.
        """
        return [shard for weight in self.weights for shard in weight.shards()]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Disables the adapters within a `with` block: the frozen model is then the reference of
        the policy, like `device.held_weights.ReferenceWeights`.
        """
        held: list[LinearWithPair | EmbeddingWithPair | AdaptedStack]
        held = [*self.layers.values(), *self.stacks.values()]
        for each in held:
            each.off = True
        try:
            yield
        finally:
            for each in held:
                each.off = False


def compare_copies(weight: Weight, folder: PEFTFolder) -> None:
    """Compares this process's rows of a frozen weight with the copy of it that PEFT saved in the
    adapter folder `folder`, if there is one; `PEFTFolder.compare` records a difference.
    """
    for shard in weight.shards():
        for number, (name, shape) in enumerate(
            zip(shard.logical.names, shard.logical.shapes, strict=True)
        ):
            parts = list(shard.views(number))

            def is_held(copy: Tensor, parts: list[tuple[Box, Tensor]] = parts) -> bool:
                return all(
                    torch.equal(narrowed(copy, box).to(elements), elements)
                    for box, elements in parts
                )

            folder.compare(name, shape, is_held)
