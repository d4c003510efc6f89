"""Loads Hugging Face weights into this process's parameters, reading only the slices that it needs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rftmega.backends.megatron.binding import Bound
from rftmega.converters import Rule, Vocabulary, completed, instances, left_out, located, shard
from rftmega.core.errors import CheckpointError
from rftmega.models.hf.hf_folder import HFFolder, is_finite
from rftmega.runtime.parallel.collectives import gather_objects


def refuse_strangers(
    files: HFFolder,
    rules: Sequence[Rule],
    hf_config: Mapping[str, Any],
    *,
    experts: int,
    allowed: frozenset[str],
) -> None:
    """Raises CheckpointError for tensors of the folder `files` that seem to belong to another
    model: no conversion rule in `rules` reads them, and the architecture of `hf_config`
    (config.json) is not known to ignore them.

    Tensors in `allowed` may stay unread. `experts`: number of experts of the model.
    """
    layers = completed(hf_config)["num_hidden_layers"]
    known = {
        name
        for rule, layer, expert in instances(rules, layers=layers, experts=experts)
        for name in rule.hf_names(layer, expert)
    }
    strangers = sorted(set(files.names) - known - allowed - left_out(hf_config, files.names))
    if strangers:
        numbers = (
            re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.", name) for name in strangers
        )
        behind = max((int(number[1]) for number in numbers if number), default=0)
        too_few = (
            f" Some are of layer {behind}, and num_hidden_layers={layers}."
            if behind >= layers
            else ""
        )
        raise CheckpointError(
            f"{files.folder} holds {len(strangers)} tensor(s) that its config.json does not lead to, {strangers[0]!r} first. "
            f"Weights that nobody reads would make it another model.{too_few}"
        )


HEAD = "lm_head.weight"
HEADS = frozenset({HEAD, f"language_model.{HEAD}"})  # left out by a value model


def refuse_another_head(files: HFFolder, bound: Sequence[Bound]) -> None:
    """Raises CheckpointError if the folder of a model with tied embeddings contains an LM head that
    differs from the embedding, as far as this process's parameters `bound` contain it.
    """
    for item in bound:
        if HEAD in files and isinstance(item.rule, Vocabulary) and item.hf_names[0] != HEAD:
            head, embedding = (
                shard(
                    item.rule, [files.slice_of(name, item.rule.hf[0].shape)], item.rank, item.ranks
                )
                for name in (HEAD, item.hf_names[0])
            )
            if not torch.equal(head, embedding):
                raise CheckpointError(
                    f"{files.folder}: tie_word_embeddings=true, but {HEAD} is not {item.hf_names[0]}. One of them is wrong."
                )


@torch.no_grad()
def refuse_non_finite(folder: str | Path, bound: Sequence[Bound]) -> None:
    """Raises CheckpointError, naming the tensors with NaN or infinity among the loaded parameters
    `bound`; a collective, with the same result on every process.

    The folder contains such numbers, or numbers that are too large for the training dtype.
    """
    mine = [name for item in bound for name in _non_finite(item)]
    if found := sorted({name for names in gather_objects(mine) for name in names}):
        more = f" and {len(found) - 10} more" if len(found) > 10 else ""
        raise CheckpointError(
            f"{folder} holds NaN or infinite weights in {len(found)} tensor(s): {', '.join(found[:10])}{more}. Nothing can be "
            "learnt from there; take an earlier export, or download the folder again."
        )


def _non_finite(item: Bound) -> set[str]:
    """Returns the names of the HF tensors whose part of the parameter `item` contains NaN or
    infinity.
    """
    if is_finite(item.parameter):
        return set()
    found = set()
    for (part, start, stop), offset in located(item.rule, item.rank, item.ranks):
        if not is_finite(item.parameter.narrow(item.rule.axis, offset, stop - start)):
            found.add(item.hf_names[part])
    return found


@torch.no_grad()
def load_hf(files: HFFolder, bound: Sequence[Bound]) -> None:
    """Fills every bound parameter from `files`, reading only this process's slices.

    Raises CheckpointError for a missing tensor, a tensor of another shape or an unreadable file.
    """
    for item in bound:
        if item.rule.optional and not any(name in files for name in item.hf_names):
            continue
        slices = [
            files.slice_of(name, tensor.shape)
            for name, tensor in zip(item.hf_names, item.rule.hf, strict=True)
        ]
        item.parameter.copy_(shard(item.rule, slices, item.rank, item.ranks))
