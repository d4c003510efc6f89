"""Weights of a Hugging Face folder in host memory, as shards that a weight sync sends to engines."""

from pathlib import Path
from typing import Any

import torch

from rftmega.backends.decoder.describe import TransformersModel, read_config, tower_of
from rftmega.backends.decoder.meta_decoder import describe, state_buffers
from rftmega.backends.decoder.parameter_places import (
    buffer_dtype,
    places_of,
    plan_of_buffer,
    plans_of,
    read,
)
from rftmega.config.options.adapters import EMBEDDING
from rftmega.converters.adapters import WEIGHT
from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import read_json_object
from rftmega.core.shards import Shard
from rftmega.model_providers.output_head import names_of_head
from rftmega.model_providers.transformers_decoders import on_meta
from rftmega.models.hf.hf_folder import HFFolder, is_finite
from rftmega.models.hf.peft_folder import PEFTFolder
from rftmega.models.hf.quantised_folder import open_quantised
from rftmega.run.conversion.adapters import compare_copies


class FolderWeights:
    """FolderWeights holds all weights of one model in host memory. `load` replaces them by those of
    another folder of the same architecture.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype):
        """Reads the weights of `folder` in `dtype`, the dtype of a trainer's forward pass; state
        buffers keep their own. Raises CheckpointError if the folder's config or weights can't be
        used.
        """
        config = read_config(folder)
        self.model = on_meta(config, "eager")
        self.description: TransformersModel = describe(self.model, tower_of(folder, config))
        self.dtype = dtype
        self.shards: list[Shard] = []
        self._held: list[tuple[str, torch.Tensor, list[Shard]]] = []
        self._plan(_opened(folder))
        self.load(folder)

    def _plan(self, files: HFFolder) -> None:
        """Allocates memory for each parameter, and describes the folder's tensors in it."""
        parameters = dict(self.model.named_parameters())
        buffers = state_buffers(self.model)
        wanted = {name: tuple(each.shape) for name, each in (*parameters.items(), *buffers.items())}
        heads = names_of_head(self.model)[:1] if self.description.tied else []
        places = places_of(self.model, wanted, files, allowed=heads)
        embedding = self.model.get_input_embeddings().weight
        for name, parameter in parameters.items():
            rows = torch.empty(wanted[name], dtype=self.dtype)
            opens = parameter is embedding
            plans = plans_of(name, places[name], (0, len(rows)), self.dtype, opens=opens)
            self._held.append((name, rows, [plan.of(rows) for plan in plans]))
        for name, buffer in buffers.items():
            (place,) = places[name]
            dtype = buffer_dtype(files, place.name, buffer)
            values = torch.empty(wanted[name], dtype=dtype)
            plan = plan_of_buffer(place.name, place.shape, dtype)
            self._held.append((name, values, [plan.of(values)]))
        self.shards = [shard for _, _, shards in self._held for shard in shards]

    @torch.no_grad()
    def load(self, folder: str | Path, adapter: str | Path = "") -> None:
        """Replaces the weights by those of `folder`, with the LoRA adapters of the PEFT folder
        `adapter` added to them in float32 and rounded once, as a push of merged weights does; "":
        no adapters.

        Raises CheckpointError if a tensor is missing, has another shape or is not finite, or for
        adapters that do not belong to the model.
        """
        files = _opened(folder)
        for name, values, shards in self._held:
            read(files, shards)
            if not is_finite(values):
                raise CheckpointError(f"{files.folder}: NaN or infinite weights in {name}.")
        if adapter:
            self._merge(files, PEFTFolder(adapter, option="--adapter"))

    def _merge(self, files: HFFolder, pairs: PEFTFolder) -> None:
        if self.description.tied and any(
            module.rpartition(".")[2] == EMBEDDING for module in pairs.modules
        ):
            raise CheckpointError(
                f"{pairs.folder} has an adapter for the embedding, which is the output head of {files.folder} as well: PEFT adds "
                "it to the embedding alone, and merged weights can't."
            )
        compare_copies(files, pairs)
        modules, merged = set(pairs.modules), set()
        for shard in self.shards:
            for number, name in enumerate(shard.logical.names):
                module = name.removesuffix(WEIGHT)
                if module not in modules:
                    continue
                merged.add(module)
                a, b = pairs.pair(module, *shard.logical.shapes[number])
                whole = files.whole(name, shard.logical.shapes[number]).float()
                whole += pairs.scaling * (b.float() @ a.float())
                for box, elements in shard.views(number):
                    elements.copy_(whole[tuple(slice(low, high) for low, high in box)])
        if modules := modules - merged:
            raise CheckpointError(
                f"{pairs.folder} has adapters for {min(modules)!r} ({len(modules)} such), which {files.folder} does not hold. "
                "Give the model that they were trained with."
            )


def _opened(folder: str | Path) -> HFFolder:
    said: dict[str, Any] = read_json_object(Path(folder) / "config.json")
    return open_quantised(folder, said)
