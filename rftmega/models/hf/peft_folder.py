"""Reads and writes adapter folders in PEFT's format: adapter_model.safetensors and
adapter_config.json.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rftmega.config.options.adapters import LoRA, scaling_of
from rftmega.config.options.peft_fields import foreign_fields
from rftmega.converters.adapters import (
    DOWNS,
    EMBEDDING_DOWN,
    EMBEDDING_UP,
    UP,
    UPS,
    WEIGHT,
    module_of,
    pair_names,
    target_of,
)
from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import read_json_object
from rftmega.core.shards import OF_VOCABULARY
from rftmega.models.hf.adapter_card import write_card
from rftmega.models.hf.hf_folder import HFFolder, PlannedTensor, write_shard

Whole = Callable[[str, tuple[int, ...]], Tensor]  # a matrix, by name and shape
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # prefix of module names in transformers' model
# copies of frozen weights, which PEFT writes in addition to the pairs of embedding and LM head
COPY = f".base_layer{WEIGHT}"
COPIES = tuple(name + COPY for name in OF_VOCABULARY)
WRITTEN: dict[str, Any] = {  # further options of adapters, which PEFT writes as unused
    **{"use_dora": False, "fan_in_fan_out": False, "lora_bias": False},
    **{"bias": "none", "modules_to_save": None, "layers_to_transform": None},
    **{"rank_pattern": {}, "alpha_pattern": {}},
}


def beginning(seed: int) -> Whole:
    """Returns a function that creates the initial LoRA matrices by name and shape; B is zero, A is
    drawn from PEFT's distribution, with a random seed derived from `seed` and the matrix's name.

    For an embedding A is zero, and B is drawn. So new adapters don't change the model's output.
    """

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith((UP, EMBEDDING_DOWN)):
            return torch.zeros(shape)
        random = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if name.endswith(EMBEDDING_UP):
            return torch.randn(shape, generator=random)
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=random)

    return drawn


class LookedAt(NamedTuple):
    """LookedAt holds two sets of tensor names of a PEFT folder: those that a process has read, and
    those of PEFT's copies of frozen weights that differ from the model's weights.
    """

    read: set[str]
    changed: set[str]


class PEFTFolder:
    """PEFTFolder reads the LoRA adapters in one PEFT folder."""

    def __init__(self, folder: str | Path, *, option: str = ""):
        """Opens the PEFT folder `folder`; `option` is the config option that names it, for
        messages.

        Raises CheckpointError for adapters other than supported LoRA adapters.
        """
        self.folder = Path(folder)
        self._named = f"{option}: " if option else ""
        said = read_json_object(self.folder / CONFIG)
        modules: Any = said.get("target_modules")
        found = foreign_fields(said)
        if (kind := said.get("peft_type")) != "LORA":
            found.append(f"peft_type={kind} is not LORA")
        if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
            found.append(f"target_modules={modules} is no list of modules")
        if not isinstance(said.get("r"), int) or not isinstance(
            said.get("lora_alpha"), int | float
        ):
            found.append("r or lora_alpha is no number")
        if found:
            self._refuse(found)
        self.rank, self.alpha = int(said["r"]), float(said["lora_alpha"])
        self.rslora = bool(said.get("use_rslora"))
        self.targets = {name.rsplit(".", 1)[-1] for name in modules}
        self.files = HFFolder(self.folder)
        self._refuse_odd(modules)
        self._read: set[str] = set()
        self._changed: set[str] = set()

    def _refuse(self, reasons: Sequence[str]) -> None:
        raise CheckpointError(f"{self._named}{self.folder / CONFIG}: {'; '.join(reasons)}.")

    def _refuse_odd(self, targets: Sequence[str]) -> None:
        """Raises CheckpointError for tensors that belong to no complete pair, or to a pair on a
        module that `targets` does not include.
        """
        names = set(self.files.names)
        pairs = {PREFIX + each for module in self.modules for each in pair_names(module)}
        copies = {name for name in names if name.endswith(COPIES)}
        if odd := sorted(names - pairs - copies):
            self._refuse([f"{odd[0]!r} is no matrix of a pair"])
        for module in self.modules:
            if not any(f".{module}".endswith(f".{target}") for target in targets):
                self._refuse([f"a pair is on {module!r}, which target_modules do not name"])

    def check(self, lora: LoRA, targets: Iterable[str]) -> None:
        """Raises CheckpointError if the folder's rank, alpha or rsLoRA setting differs from that of
        `lora`, or if its target modules differ from `targets`.
        """
        pairs = (("r", "rank"), ("lora_alpha", "alpha"), ("use_rslora", "rslora"))
        found = [
            f"{theirs}={_told(getattr(self, ours))} is not {_told(getattr(lora, ours))}, which model.lora.{ours} says"
            for theirs, ours in pairs
            if getattr(self, ours) != getattr(lora, ours)
        ]
        if self.targets != (wanted := set(targets)):
            found.append(
                f"target_modules={sorted(self.targets)} are not those of model.lora.targets, {', '.join(sorted(wanted))}"
            )
        if found:
            self._refuse(found)

    @property
    def scaling(self) -> float:
        """Returns the factor by which the product B A of a pair is multiplied."""
        return scaling_of(self.rank, self.alpha, rslora=self.rslora)

    @property
    def modules(self) -> list[str]:
        """Returns the names of the modules that have a LoRA pair, without PEFT's prefix."""
        return [
            module_of(name.removeprefix(PREFIX))
            for name in self.files.names
            if name.endswith(DOWNS)
        ]

    def pair(self, module: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Reads the LoRA matrices (A [rank, columns], B [rows, rank]) of the module named `module`,
        whose weight is [`rows`, `columns`].

        For an embedding PEFT stores the pair transposed and in the opposite order, since its A is
        the matrix that is looked up. Raises CheckpointError if a matrix is missing or has another
        shape.
        """
        down, up = pair_names(module)
        if down.endswith(EMBEDDING_DOWN):
            a = self.whole(up, (columns, self.rank)).T
            return a, self.whole(down, (self.rank, rows)).T
        a = self.whole(down, (self.rank, columns))
        return a, self.whole(up, (rows, self.rank))

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Reads a tensor by its name without PEFT's prefix.

        Raises CheckpointError if the tensor is missing or has another shape.
        """
        self._read.add(PREFIX + name)
        return self.files.whole(PREFIX + name, shape)

    def compare(self, weight: str, shape: tuple[int, ...], held: Callable[[Tensor], bool]) -> None:
        """Records whether PEFT's copy of a frozen weight, if the folder has one, differs from the
        model's weight named `weight`, which has shape `shape`.

        `held` gets the copy and returns whether it equals the part of the weight on this process.
        """
        name = PREFIX + weight.removesuffix(WEIGHT) + COPY
        if name in self.files:
            self._read.add(name)
            if not held(self.files.whole(name, shape)):
                self._changed.add(name)

    @property
    def looked_at(self) -> LookedAt:
        """Returns the names of the tensors that this process has read, and of those that differ
        from the model's weights, for `refuse_rest`.
        """
        return LookedAt(self._read, self._changed)

    def refuse_copies(self, everyones: Sequence[LookedAt]) -> None:
        """Raises CheckpointError if a process found copies of frozen weights that differ from the
        model's: the adapter was trained with those copies.
        `everyones`: the `looked_at` of every process.
        """
        if changed := sorted(set().union(*(each.changed for each in everyones))):
            self._refuse(
                [
                    f"{changed[0]!r} is another matrix than the model's own, which PEFT would replace by it. Write it into the "
                    "model's folder first"
                ]
            )

    def refuse_rest(self, everyones: Sequence[LookedAt]) -> None:
        """Raises CheckpointError for tensors that no process has read, and for changed copies as
        `refuse_copies` does.
        `everyones`: the `looked_at` of every process.
        """
        self.refuse_copies(everyones)
        if rest := sorted(set(self.files.names).difference(*(each.read for each in everyones))):
            self._refuse(
                [
                    f"{rest[0]!r} ({len(rest)} such) has no place in this model, so it would be left out. Take the folder of "
                    "the model that the adapter was made for"
                ]
            )


def _told(value: float | bool) -> str:
    return str(value) if isinstance(value, bool) else f"{value:g}"


def names_of_pairs(names: Iterable[str]) -> set[str]:
    """Returns the tensor names in `names` that belong to a complete LoRA pair: the module's first
    matrix (A) is also among `names`.

    A second matrix (B) without an A belongs to a tensor without an adapter, and is zero.
    """
    known = set(names)
    return {name for name in known if pair_names(module_of(name))[0] in known}


def trained_whole(names: Iterable[str]) -> list[str]:
    """Returns the tensor names in `names` that are no LoRA matrix: tensors of a value head, which
    are trained in full.
    """
    return [name for name in names if not name.endswith((*DOWNS, *UPS))]


def write_pairs(
    folder: Path, planned: Sequence[PlannedTensor], tensors: Iterator[tuple[str, Tensor]]
) -> set[str]:
    """Writes the LoRA tensors of a stream, which yields the `planned` tensors in order, and returns
    the names of the target modules.
    If only some HF tensors of a fused weight have an adapter, the stream contains zeros as the
    second matrix of the HF tensors without one; these zeros are not written.
    """
    pairs = names_of_pairs(each.name for each in planned)
    kept = pairs.union(trained_whole(each.name for each in planned))
    coming = [each._replace(name=PREFIX + each.name) for each in planned if each.name in kept]
    stream = ((PREFIX + name, tensor) for name, tensor in tensors if name in kept)
    write_shard(folder / WEIGHTS, coming, stream)
    return {target_of(name) for name in pairs}


def described(*, rank: int, alpha: float, targets: Iterable[str], rslora: bool) -> dict[str, Any]:
    """Returns the fields of adapter_config.json that describe the pairs: rank, alpha, rsLoRA and
    target modules.
    """
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": rslora,
        "target_modules": sorted(targets),
    }


def write_config(
    folder: Path,
    *,
    base: str,
    rank: int,
    alpha: float,
    targets: Iterable[str],
    dropout: float = 0.0,
    rslora: bool = False,
    whole: Sequence[str] = (),
) -> None:
    """Writes adapter_config.json and a model card.

    `whole`: names of tensors trained in full, which belong to a value head (see `trained_whole`).
    """
    modules = sorted({name.rpartition(".")[0] for name in whole})
    said = {
        **described(rank=rank, alpha=alpha, targets=targets, rslora=rslora),
        "task_type": _task_of(whole),
        "base_model_name_or_path": base,
        "lora_dropout": dropout,
        "inference_mode": True,
        **WRITTEN,
        "modules_to_save": modules or None,
    }
    (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n")
    write_card(
        folder,
        base=base,
        task=said["task_type"],
        rank=rank,
        alpha=alpha,
        rslora=rslora,
        targets=sorted(targets),
        whole=modules,
    )


def _task_of(whole: Sequence[str]) -> str:
    """Returns PEFT's task type; `whole` lists the names of tensors trained in full, which only a
    value model has.
    """
    if not whole:
        return "CAUSAL_LM"
    # transformers' sequence classifiers have no bias
    return "TOKEN_CLS" if any(name.endswith(".bias") for name in whole) else "SEQ_CLS"
