"""Hugging Face weights into this process's shards; reads only the slices that it holds."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from converters import Rule, Vocabulary, instances, left_out, shard
from rftmega.errors import CheckpointError
from rftmega.megatron.binding import Bound


class HFFolder:
    """The safetensors files of a model folder, opened lazily and once each."""

    def __init__(self, folder: str | Path):
        """Raises CheckpointError where the folder holds no weights."""
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            files = sorted(path.name for path in self.folder.glob("*.safetensors"))
            if not files:
                raise CheckpointError(f"{folder} holds no *.safetensors weights.")
            self._file_of = {name: file for file in files for name in self._file(file).keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> Iterable[str]:
        return self._file_of

    def slice_of(self, name: str, shape: tuple[int, ...]) -> Any:
        """A lazy slice of tensor `name`. Raises CheckpointError where it is missing or of another shape."""
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}, which its config.json asks for.")
        file = self._file_of[name]
        found = self._file(file).get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise CheckpointError(
                f"{self.folder / file}: {name} has shape {tuple(found.get_shape())}; config.json asks for {shape}."
            )
        return found

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (SafetensorError, FileNotFoundError) as error:
                raise CheckpointError(f"{self.folder / name} can't be read: {error}") from error
        return self._open[name]


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
    strangers = sorted(name for name in files.names if name not in known | allowed and not left_out(hf_config, name))
    if strangers:
        raise CheckpointError(
            f"{files.folder} holds {len(strangers)} tensor(s) that its config.json does not lead to, {strangers[0]!r} first. "
            "Weights that nobody reads would make it another model."
        )


HEAD = "lm_head.weight"


def refuse_another_head(files: HFFolder, bound: Sequence[Bound]) -> None:
    """Some folders of tied models hold the output head nevertheless: raises CheckpointError where it is not the embedding."""
    for item in bound:
        if HEAD in files and isinstance(item.rule, Vocabulary) and item.hf_names[0] != HEAD:
            head = shard(item.rule, [files.slice_of(HEAD, item.rule.hf[0].shape)], item.rank, item.ranks)
            if not torch.equal(head.to(item.parameter), item.parameter):
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
