"""Exports the policy as a Hugging Face folder that `transformers` and vLLM load."""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from rftmega.converters import stacks_of
from rftmega.core.errors import CheckpointError
from rftmega.core.json_files import read_json_object
from rftmega.models.hf import export_folder
from rftmega.models.hf.classifier import say_classifier
from rftmega.models.hf.hf_folder import (
    PlannedTensor,
    copy_companions,
    shards_of,
    write_index,
    write_shard,
)
from rftmega.models.hf.quantised_folder import Quantising
from rftmega.models.hf.stacked_files import Stacking
from rftmega.runtime.parallel.collectives import gather_objects
from rftmega.weights.gather import Exporter

Write = Callable[[Iterator[tuple[str, Tensor]]], None]
SHARD_BYTES = 4 * 2**30

log = logging.getLogger(__name__)


def export_hf_folder(
    exporter: Exporter,
    source: str | Path,
    target: str | Path,
    *,
    write: bool,
    classifier: bool = False,
    quantised: bool = False,
) -> None:
    """Writes the weights that `exporter` gathers to the folder `target` as indexed safetensors
    shards, with the config and tokenizer files of the HF folder `source`.

    `classifier`: the weights are a value model's, which `transformers` calls a sequence classifier
    with one label. `quantised`: store the weights that are quantised in `source` as 8-bit numbers
    with scales.

    A collective: every process calls it, but only the process with `write` set writes files. It
    writes into a temporary folder, which is renamed when complete, so `target` is never
    half-written. An earlier export in `target` is replaced; other files there stay
    (`export_folder`). Raises CheckpointError on all processes if the export fails.
    """

    def written(tensors: Iterator[tuple[str, Tensor]]) -> None:
        _write(
            tensors,
            exporter,
            Path(source),
            Path(target),
            classifier=classifier,
            quantising=_quantising(Path(source)) if quantised else None,
        )

    gather_to(exporter, target, written if write else None)


def rehearse_hf_folder(
    exporter: Exporter,
    source: str | Path,
    target: str | Path,
    *,
    write: bool,
    classifier: bool = False,
    quantised: bool = False,
) -> None:
    """Runs `export_hf_folder` without gathering or writing weights and removes its output, so that
    an export that would fail is found before training starts.

    A collective. Raises CheckpointError on all processes if the export would fail.
    """
    error, draft = None, Path(f"{target}.incomplete")
    if write:
        try:
            draft = export_folder.begin(Path(target))
            quantising = _quantising(Path(source)) if quantised else None
            shards, _ = _streamed(exporter, iter(()), Path(source), quantising)
            write_index(draft, shards)
            _write_beside(Path(source), draft, shards, classifier=classifier, quantised=quantised)
        except (OSError, CheckpointError) as raised:
            error = f"At its end, the model could not be exported to {target}: {raised}"
        finally:
            if not export_folder.is_anothers(draft):
                shutil.rmtree(draft, ignore_errors=True)
    if errors := list(filter(None, gather_objects(error))):
        raise CheckpointError(errors[0])


def gather_to(exporter: Exporter, target: str | Path, write: Write | None) -> None:
    """Gathers the whole HF tensors from the shards of all processes, a collective, and passes an
    iterator of (name, tensor) to `write` on the process where `write` is not None. `target`: the
    path that `write` stores the tensors in, for error messages.

    Raises CheckpointError on all processes if the export fails.
    """
    tensors, error = iter(exporter), None
    if write is not None:
        try:
            write(tensors)
        except OSError as raised:
            error = f"The model can't be exported to {target}, which needs room and rights: {type(raised).__name__}: {raised}"
        except CheckpointError as raised:  # in the model or its companion files
            stays = ", where an earlier export stays" if Path(target).exists() else ""
            error = f"The model can't be exported to {target}{stays}: {raised}"
            shutil.rmtree(f"{target}.incomplete", ignore_errors=True)
    for _ in tensors:  # a collective: the other processes send the rest even if writing failed
        pass
    if errors := list(filter(None, gather_objects(error))):
        raise CheckpointError(errors[0])


def _write(
    tensors: Iterator[tuple[str, Tensor]],
    exporter: Exporter,
    source: Path,
    target: Path,
    *,
    classifier: bool,
    quantising: Quantising | None,
) -> None:
    draft = export_folder.begin(target)
    shards, stream = _streamed(exporter, tensors, source, quantising)
    for file, planned in shards.items():
        write_shard(draft / file, planned, stream)
    write_index(draft, shards)
    quantised = quantising is not None
    if changed := _write_beside(source, draft, shards, classifier=classifier, quantised=quantised):
        log.info("%s: %s", target, changed)
    export_folder.settle(draft, target)


def _streamed(
    exporter: Exporter,
    tensors: Iterator[tuple[str, Tensor]],
    source: Path,
    quantising: Quantising | None,
) -> tuple[dict[str, list[PlannedTensor]], Iterator[tuple[str, Tensor]]]:
    """Returns the tensors planned for each output file, by file name, and an iterator over the
    tensors of all files in that order.
    """
    stacking = Stacking(stacks_of(read_json_object(source / "config.json")))
    coming = stacking.planned(exporter.planned)
    stream = stacking.stacked(tensors)
    if quantising is not None:
        coming, stream = quantising.planned(coming), quantising.quantised(stream)
    return shards_of(coming, SHARD_BYTES), stream


def _write_beside(
    source: Path,
    draft: Path,
    shards: dict[str, list[PlannedTensor]],
    *,
    classifier: bool,
    quantised: bool,
) -> str | None:
    """Writes the config, tokenizer and other companion files of `source` to `draft`, where the
    tensors of `shards` are written. Returns a description of the changes in config.json, or None if it is unchanged.
    """
    changed = copy_companions(source, draft, shards, quantised=quantised)
    if classifier:
        say_classifier(draft / "config.json")
    return changed


def _quantising(source: Path) -> Quantising:
    return Quantising.like(source, read_json_object(source / "config.json"))
