"""Hugging Face weights into this process's shards; reads only the slices that it holds."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from converters import Rule, Vocabulary, instances, left_out, shard
from converters.hf_folder import HFFolder
from rftmega.errors import CheckpointError
from rftmega.megatron.binding import Bound


def refuse_strangers(
    files: HFFolder, rules: Sequence[Rule], hf_config: Mapping[str, Any], *, experts: int, allowed: frozenset[str]
) -> None:
    """Raises CheckpointError for tensors that no rule reads and that the family does not leave out: another model's.

    `allowed` are read nowhere either.
    """
    known = {
        name
        for rule, layer, expert in instances(rules, layers=hf_config["num_hidden_layers"], experts=experts)
        for name in rule.hf_names(layer, expert)
    }
    strangers = sorted(set(files.names) - known - allowed - left_out(hf_config, files.names))
    if strangers:
        layers = hf_config["num_hidden_layers"]
        numbers = (re.match(r"model\.layers\.(\d+)\.", name) for name in strangers)
        behind = max((int(number[1]) for number in numbers if number), default=0)
        too_few = f" Some are of layer {behind}, and num_hidden_layers={layers}." if behind >= layers else ""
        raise CheckpointError(
            f"{files.folder} holds {len(strangers)} tensor(s) that its config.json does not lead to, {strangers[0]!r} first. "
            f"Weights that nobody reads would make it another model.{too_few}"
        )


HEAD = "lm_head.weight"


def refuse_another_head(files: HFFolder, bound: Sequence[Bound]) -> None:
    """Some folders of tied models hold the output head nevertheless: raises CheckpointError where it is not the embedding."""
    for item in bound:
        if HEAD in files and isinstance(item.rule, Vocabulary) and item.hf_names[0] != HEAD:
            head, embedding = (
                shard(item.rule, [files.slice_of(name, item.rule.hf[0].shape)], item.rank, item.ranks)
                for name in (HEAD, item.hf_names[0])
            )
            if not torch.equal(head, embedding):
                raise CheckpointError(
                    f"{files.folder}: tie_word_embeddings=true, but {HEAD} is not {item.hf_names[0]}. One of them is wrong."
                )


@torch.no_grad()
def load_hf(files: HFFolder, bound: Sequence[Bound]) -> None:
    """Fills every bound parameter from `files`, reading only this process's slices.

    Raises CheckpointError for a missing tensor, a wrong shape or an unreadable file.
    """
    for item in bound:
        if item.rule.optional and not any(name in files for name in item.hf_names):
            continue
        slices = [files.slice_of(name, tensor.shape) for name, tensor in zip(item.hf_names, item.rule.hf, strict=True)]
        item.parameter.copy_(shard(item.rule, slices, item.rank, item.ranks))
