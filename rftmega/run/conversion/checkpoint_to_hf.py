"""Writes a model of a training checkpoint as a Hugging Face folder, for any training backend and
layout: one tensor at a time, without a GPU.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rftmega.checkpoints.frozen_weights import share_of
from rftmega.checkpoints.reader import PROGRESS
from rftmega.checkpoints.training_files import StoredModel, TrainingReader
from rftmega.converters import FAMILIES, stacks_of
from rftmega.core.errors import CheckpointError
from rftmega.models.hf import export_folder, peft_folder
from rftmega.models.hf.checksums import files_of, sum_of, write_sums
from rftmega.models.hf.classifier import say_classifier
from rftmega.models.hf.hf_folder import (
    PlannedTensor,
    copy_companions,
    shards_of,
    write_index,
    write_shard,
)
from rftmega.models.hf.quantised_folder import open_quantised
from rftmega.models.hf.stacked_files import Stacking
from rftmega.run.conversion import adapters
from rftmega.run.conversion.convert import FolderTensors
from rftmega.run.conversion.target_folder import FILE_BYTES, Progress, begin, note, written_alone

CRITIC, WEIGHTS, HEAD, SCORE = "critic", "weights", "lm_head.weight", "score.weight"


class SavedModel:
    """SavedModel reads the weights of one model of a training checkpoint under Hugging
    Face names.
    """

    def __init__(self, checkpoint: Path, name: str = "", base: Path | None = None):
        """`name`: name of the model in the checkpoint; "" selects the trained model that is not the
        critic. `base`: the folder that the run started from; None: the path stored in the
        checkpoint.

        Raises CheckpointError if the checkpoint has no model `name`, or the base folder is missing.
        """
        self.reader = TrainingReader(checkpoint)
        models: dict[str, Any] = self.reader.manifest["models"]
        self.name = name or next((each for each in models if each != CRITIC), CRITIC)
        if self.name not in models:
            raise CheckpointError(f"{checkpoint} holds {', '.join(models)}, and no {self.name}.")
        self.said = StoredModel(self.reader, self.name).said
        self.base = base or Path(self.said["path"])
        if not (self.base / "config.json").is_file():
            raise CheckpointError(
                f"{checkpoint} is of a model that began with {self.base}, whose tokenizer and config.json belong to it, and that "
                "is no such folder here. Say where it is: --base HF_DIR."
            )
        prefix = f"{self.name}/{WEIGHTS}/"
        self.planned = [
            PlannedTensor(key.removeprefix(prefix), self.reader.dtype_of(key), tuple(shape))
            for key, shape in self.reader.manifest["shapes"].items()
            if key.startswith(prefix)
        ]

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.planned)

    def frozen(self) -> tuple[FolderTensors, list[PlannedTensor]] | None:
        """Returns (the base folder, its tensors that the checkpoint omits) if the run froze the
        vision encoder; None otherwise.
        """
        if not self.reader.manifest["config"]["model"].get("freeze_vision"):
            return None
        own = {tensor.name for tensor in self.planned}
        files = FolderTensors(self.base)
        return files, [each for each in files.planned if each.name not in own | {HEAD}]

    def tensors(self, planned: list[PlannedTensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) for each of `planned`; checksums are verified on reading."""
        for name, *_ in planned:
            yield name, self.reader.whole(f"{self.name}/{WEIGHTS}/{name}")


def to_hf(model: SavedModel, target: Path, *, progress: Progress = lambda _: None) -> str | None:
    """Writes the model into the folder `target`. Adapters are written to `target`_adapter in PEFT's
    format and merged in `target`. Resumes an interrupted conversion.

    `progress`: called with the number of bytes finished since the last call. Returns a text about
    the adapters, or about the changes made to config.json (None if there are none).
    """
    if "adapters" in model.said:
        return _adapted(model, target, progress)
    family = model.said["hf_config"].get("model_type")
    stacking = Stacking(stacks_of(model.said["hf_config"]) if family in FAMILIES else [])
    files, frozen = model.frozen() or (None, [])
    planned = [*model.planned, *frozen]
    shards = shards_of(stacking.planned(planned), FILE_BYTES)
    job = {"source": model.reader.manifest["ranks"], "model": model.name}
    with written_alone(target):
        finished = begin(target, job)
        sums: dict[str, str] = {}
        for file, wanted in shards.items():
            if "sum" not in finished.get(file, {}):
                names = stacking.matrices(tensor.name for tensor in wanted)
                stream = _stream(model, [each for each in planned if each.name in names], files)
                written = write_shard(target / file, wanted, stacking.stacked(stream))
                finished[file] = {"file": file, "sum": f"xxh3:{written.file}"}
                note(target, finished[file])
            sums[file] = finished[file]["sum"]
            progress(sum(tensor.bytes for tensor in wanted))
        changed = copy_companions(model.base, target, shards)
        if any(tensor.name == SCORE for tensor in model.planned):
            say_classifier(target / "config.json")
        write_index(target, shards)
        others = [path for path in files_of(target) if path.name not in sums]
        write_sums(target, sums | {path.name: sum_of(path, "xxh3") for path in others})
        (target / PROGRESS).unlink()
    return changed


def _stream(
    model: SavedModel, planned: list[PlannedTensor], files: FolderTensors | None
) -> Iterator[tuple[str, Tensor]]:
    own = {tensor.name for tensor in model.planned}
    for each in planned:
        if each.name in own:
            yield from model.tensors([each])
        else:
            assert files is not None, "only a frozen part is not in the checkpoint"
            yield each.name, files.files.whole(each.name, each.shape)


def _adapted(model: SavedModel, target: Path, progress: Progress) -> str:
    """Writes the adapters to `target`_adapter, and the base model with these adapters merged to
    `target`. Returns a text about both folders.

    Raises CheckpointError for a model that only a run can export, or if the base weights are not
    those that the adapters were trained on.
    """
    whole = peft_folder.trained_whole(tensor.name for tensor in model.planned)
    chosen, lora = model.said["adapters"], model.reader.manifest["config"]["model"]["lora"]
    if whole or chosen.get("base_on_host"):
        what = f"a value head beside adapters ({whole[0]})" if whole else "base_on_host=int8"
        raise CheckpointError(
            f"{model.reader.folder} has {what}, which only a run writes: resume it with the last step for trainer.steps, or save "
            "with checkpoint.hf=true."
        )
    if (found := _sum_of(model)) != model.said["base"]:
        raise CheckpointError(
            f"The adapters in {model.reader.folder} belong to other weights than those in {model.base} (checksums "
            f"{model.said['base']} and {found}). Say where these are: --base HF_DIR."
        )
    folder = target.with_name(f"{target.name}_adapter")
    try:
        draft = export_folder.begin(folder)
        targets = peft_folder.write_pairs(draft, model.planned, model.tensors(model.planned))
        rslora, dropout = bool(chosen.get("rslora")), float(lora["dropout"])
        peft_folder.write_config(
            draft, base=str(model.base), rank=chosen["rank"], alpha=chosen["alpha"], dropout=dropout,
            rslora=rslora, targets=targets,
        )  # fmt: skip
        folder = export_folder.settle(draft, folder)
    except OSError as error:
        raise CheckpointError(f"{folder} can't be written: {error}.") from error
    return (
        f"{folder}: the adapters\n{adapters.merge(model.base, folder, target, progress=progress)}"
    )


def _sum_of(model: SavedModel) -> int:
    """Returns the checksum of the base model's weights, as `checkpoints.frozen_weights.sum_of`
    computes it.
    """
    known = model.said["hf_config"].get("model_type") in FAMILIES
    files = FolderTensors(model.base) if known else None
    read = files.files if files is not None else open_quantised(model.base, model.said["hf_config"])
    names = [each.name for each in files.planned] if files is not None else sorted(read.names)
    tied = model.said["hf_config"].get("tie_word_embeddings")
    usual = str(model.said["dtype"]).removeprefix("torch.")
    dtypes: dict[str, str] = model.said.get("base_dtypes", {})
    total = 0
    for name in names:
        if tied and name == HEAD:
            continue
        tensor = read.whole(name, read.shape_of(name), integers=None).contiguous()
        held = tensor.to(getattr(torch, dtypes.get(name, usual)))
        total += int(share_of(name, held))
    return (total + 2**63) % 2**64 - 2**63
