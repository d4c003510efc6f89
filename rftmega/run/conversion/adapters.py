"""Merges LoRA adapters into a model's weights, and approximates the difference of two models by
adapters. Models are read one tensor at a time.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rftmega.config.options.adapters import EMBEDDING, HEAD, HF_TARGETS
from rftmega.converters.adapters import EMBEDDING_DOWN, WEIGHT, pair_names
from rftmega.core.errors import CheckpointError, ConfigError
from rftmega.core.json_files import read_json_object
from rftmega.models.hf import export_folder
from rftmega.models.hf.hf_folder import HFFolder, PlannedTensor, write_shard
from rftmega.models.hf.peft_folder import PEFTFolder, write_config, write_pairs
from rftmega.models.hf.quantised_folder import open_quantised
from rftmega.run.conversion.plain_safetensors import write_folder
from rftmega.run.conversion.target_folder import Progress, fingerprint

EXACT = 1024  # rows or columns up to which all singular values are computed
# oversampling and iterations of the randomised SVD of larger matrices (Halko et al.,
# arXiv:0909.4061)
SPARE, ROUNDS = 16, 6


class Merged(NamedTuple):
    """Merged is the result of `merge`."""

    pairs: int  # number of merged pairs (A, B)
    lost: float  # norm of the rounding error / norm of the merged products
    changed: str | None  # fields of config.json that were changed

    def __str__(self) -> str:
        said = f"{self.pairs} pairs are merged; rounding took {self.lost:.2%} of what they add"
        return f"{said}\n{self.changed}" if self.changed else said


class Extracted(NamedTuple):
    """Extracted is the result of `extract`."""

    pairs: int  # number of extracted pairs (A, B)
    lost: float  # norm of the residual / norm of the difference, over the adapted weights
    beside: list[str]  # names of other tensors that differ, which adapters can't represent

    def __str__(self) -> str:
        said = f"{self.pairs} pairs; they lack {self.lost:.2%} of what their weights differ by"
        if not self.beside:
            return said
        return f"{said}\n{len(self.beside)} other tensors differ, which adapters do not hold: {self.beside[0]}, ..."


def merge(
    source: Path, adapter: Path, target: Path, *, progress: Progress = lambda _: None
) -> Merged:
    """Writes to `target` the model of `source` with the adapters of the PEFT folder `adapter` added
    to its weights, in float32 and rounded once to each weight's dtype. Resumes an interrupted
    merge.

    `progress`: called with the number of bytes finished since the last call. Raises CheckpointError
    for an adapter of an unsupported type, on a module that the model lacks, or on an embedding tied
    to the LM head.
    """
    files, pairs = _opened(source), PEFTFolder(adapter)
    modules = set(pairs.modules)
    strangers = sorted(module for module in modules if module + WEIGHT not in files)
    if strangers:
        raise CheckpointError(
            f"{adapter} has adapters for {strangers[0]!r} ({len(strangers)} such), which {source} does not hold."
        )
    if found := _tied_embedding(files, modules):
        raise CheckpointError(
            f"{adapter} has an adapter for {found!r}, which is the output head of {source} as well: PEFT adds it to the "
            "embedding alone, and a merged folder can't. Untie the folder first."
        )
    compare_copies(files, pairs)
    job = {"source": fingerprint(files), "adapter": fingerprint(pairs.files)}
    write = partial(_merged_file, files=files, pairs=pairs)
    done, changed = write_folder(source, target, files, job, write, progress)
    added, lost = (math.fsum(said[name] for said in done.values()) for name in ("added", "lost"))
    return Merged(len(modules), _share(lost, added), changed)


def _opened(folder: Path) -> HFFolder:
    return open_quantised(folder, read_json_object(folder / "config.json"))


def _read(files: HFFolder, name: str) -> Tensor:
    return files.whole(name, files.shape_of(name), integers=None)


def compare_copies(files: HFFolder, pairs: PEFTFolder) -> None:
    """Raises CheckpointError if the PEFT folder `pairs` has a copy of a frozen weight that differs
    from the weight in the base model `files`.
    """
    for name in files.names:
        shape = files.shape_of(name)

        def is_held(copy: Tensor, name: str = name, shape: tuple[int, ...] = shape) -> bool:
            weight = files.whole(name, shape, integers=None)
            return torch.equal(copy.to(weight.dtype), weight)

        pairs.compare(name, shape, is_held)
    pairs.refuse_copies([pairs.looked_at])


def _merged_file(
    path: Path, wanted: Sequence[PlannedTensor], files: HFFolder, pairs: PEFTFolder
) -> dict[str, Any]:
    """Writes one file of a merged model to `path`. Returns its entry of the progress log.

    `wanted`: the tensors of this file; `files`: the base model; `pairs`: its adapters.
    """
    modules = set(pairs.modules)
    squares = {"added": 0.0, "lost": 0.0}

    def merged() -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape in wanted:
            weight = files.whole(name, shape, integers=None)
            if (module := name.removesuffix(WEIGHT)) in modules:
                a, b = pairs.pair(module, *shape)
                product = pairs.scaling * (b.float() @ a.float())
                whole = weight.float() + product
                weight = whole.to(dtype)
                squares["added"] += _square(product)
                squares["lost"] += _square(whole - weight.float())
            yield name, weight

    written = write_shard(path, wanted, merged())
    return {"file": path.name, "sum": f"xxh3:{written.file}", **squares}


def extract(
    base: Path,
    trained: Path,
    target: Path,
    *,
    rank: int,
    targets: Sequence[str] = HF_TARGETS,
    progress: Progress = lambda _: None,
) -> Extracted:
    """Writes to `target` a PEFT folder whose pairs are the best rank-`rank` approximation of the
    difference between the weights of `base` and `trained` (Eckart and Young,
    doi:10.1007/BF02288367), for the layers in `targets`.

    `targets`: module names such as q_proj; `progress`: called with the number of bytes finished
    since the last call. Raises CheckpointError for folders of different models; ConfigError for a
    rank that a layer can't have, for a target that the model lacks, for an embedding tied to the LM
    head, or if no layer in `targets` differs.
    """
    if rank < 1:
        raise ConfigError(f"--rank {rank}: a pair has a rank of 1 at least.")
    one, other = _opened(base), _opened(trained)
    _refuse_another_model(one, other)
    has = {_target(name) for name in one.names}
    if targets is not HF_TARGETS and (unknown := sorted(set(targets) - has)):
        raise ConfigError(
            f"--targets: {base} has no {', '.join(unknown)}. Choose from: {', '.join(n for n in HF_TARGETS if n in has)}."
        )
    named = {name.removesuffix(WEIGHT) for name in one.names if _target(name) in targets}
    if found := _tied_embedding(one, named):
        raise ConfigError(
            f"--targets: {found} is the output head of {base} as well, which a pair beside the embedding does not change. "
            f"Leave {EMBEDDING} out."
        )
    pairs: dict[str, Tensor] = {}
    beside: list[str] = []
    added = lost = 0.0
    for name in one.names:
        shape = one.shape_of(name)
        difference = _read(other, name).float() - _read(one, name).float()
        progress(math.prod(shape) * one.dtype_of(name, integers=None).itemsize)
        module = name.removesuffix(WEIGHT)
        if module not in named or module == name or len(shape) != 2:
            beside += [name] if difference.any() else []
            continue
        if rank > min(shape):
            raise ConfigError(
                f"--rank {rank} is above the {min(shape)} that {name} of {shape} has."
            )
        up, down = nearest(difference, rank)
        a, b = pair_names(module)
        turned = a.endswith(EMBEDDING_DOWN)  # PEFT's A looks up the rows of the weight
        pairs |= {a: up.T.contiguous(), b: down.T.contiguous()} if turned else {a: down, b: up}
        added += _square(difference)
        lost += _square(difference - up @ down)
    if not added:
        raise ConfigError(f"No layer of {', '.join(targets)} differs between {base} and {trained}.")
    draft = export_folder.begin(target)
    planned = [
        PlannedTensor(name, matrix.dtype, tuple(matrix.shape)) for name, matrix in pairs.items()
    ]
    modules = write_pairs(draft, planned, iter(pairs.items()))
    write_config(draft, base=str(base), rank=rank, alpha=rank, targets=modules)
    export_folder.settle(draft, target)
    return Extracted(len(pairs) // 2, _share(lost, added), beside)


def nearest(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns (B [rows, rank], A [rank, columns]), the factors of the best rank-`rank`
    approximation of a matrix; each has the square roots of the `rank` largest singular values.
    """
    if min(matrix.shape) <= EXACT:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same adapters each time
            sought = min(rank + SPARE, *matrix.shape)
            left, values, columns = torch.svd_lowrank(matrix, q=sought, niter=ROUNDS)
        right = columns.T
    roots = values[:rank].sqrt()
    return left[:, :rank] * roots, roots[:, None] * right[:rank]


def _target(name: str) -> str:
    """Returns the last part of the name of the module that a weight belongs to, such as q_proj."""
    return name.removesuffix(WEIGHT).rpartition(".")[2]


def _tied_embedding(files: HFFolder, modules: Iterable[str]) -> str:
    """Returns the name of the embedding if it is among `modules` (names of modules with adapters)
    and tied to the LM head of the model `files`, otherwise "".
    """
    found = next((name for name in modules if name.rpartition(".")[2] == EMBEDDING), "")
    config = read_json_object(files.folder / "config.json") if found else {}
    untied = HEAD + WEIGHT in files and not config.get("tie_word_embeddings")
    return "" if untied else found


def _refuse_another_model(one: HFFolder, other: HFFolder) -> None:
    if odd := sorted(set(one.names) ^ set(other.names)):
        raise CheckpointError(
            f"Only one of {one.folder} and {other.folder} holds {odd[0]!r} ({len(odd)} such)."
        )
    for name in one.names:
        shapes = one.shape_of(name), other.shape_of(name)
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{name} is {shapes[0]} in {one.folder} and {shapes[1]} in {other.folder}."
            )


def _square(matrix: Tensor) -> float:
    return float(matrix.double().square().sum())


def _share(part: float, whole: float) -> float:
    """Returns the ratio of two norms whose squares are `part` and `whole`; 0 if `whole` is 0."""
    return math.sqrt(part / whole) if whole else 0.0
