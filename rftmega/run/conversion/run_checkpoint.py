"""Finds the training checkpoint of a run, lists it, and exports its model as a Hugging Face folder.

Also lists Megatron's distributed checkpoints.
"""

import sys
from pathlib import Path

import torch
from tqdm import tqdm

from rftmega.checkpoints import retention
from rftmega.checkpoints.reader import MANIFEST, Reader, read_manifest
from rftmega.checkpoints.training_files import KIND, TrainingReader
from rftmega.core.errors import ConfigError


def checkpoint_in(folder: Path) -> Path | None:
    """Returns the latest training checkpoint in `folder` or its checkpoints/, or `folder` itself if
    it is one; None if there is none.
    """
    if not folder.is_dir() or (folder / "config.json").is_file():
        return None
    for each in (folder, folder / "checkpoints"):
        if (each / retention.LATEST).is_file():
            return retention.find(each, None)
    is_one = (folder / MANIFEST).is_file() and read_manifest(folder).get("kind") == KIND
    return folder if is_one else None


def write_model(
    checkpoint: Path, target: Path, name: str, base: Path | None, *, verify: bool
) -> int:
    """Writes the model `name` of a training checkpoint to the HF folder `target`, and prints its
    step. Returns the exit code 0.

    `name`, `base`: see `checkpoint_to_hf.SavedModel`. Raises ConfigError if `verify` (the option
    --verify) is set, since every block is verified on reading anyway.
    """
    from rftmega.run.conversion import checkpoint_to_hf
    from rftmega.run.conversion.progress_bar import progress_bar

    if verify:
        raise ConfigError(
            f"--verify: every piece of {checkpoint} is checked as it is read. Leave it out."
        )
    model = checkpoint_to_hf.SavedModel(checkpoint, name, base)
    with progress_bar(model.base, "to Hugging Face") as bar:
        changed = checkpoint_to_hf.to_hf(model, target, progress=bar.update)
    step = model.reader.manifest["step"]
    sys.stdout.write(f"{target}: the {model.name} after step {step}\n")
    if changed:
        sys.stdout.write(f"{changed}\n")
    return 0


def shown(folder: Path, *, tensors: bool, check: bool) -> int:
    """Prints the models of a training checkpoint, the inputs of its run, and the command that
    converts it. Returns the exit code 0.

    `tensors`: also print each tensor; `check`: also verify all checksums.
    """
    reader, say = TrainingReader(folder), sys.stdout.write
    manifest = reader.manifest
    pieces = [box for boxes in reader.stored.values() for box in boxes]
    say(f"kind        a run's checkpoint, after step {manifest['step']}\n")
    for name, said in manifest["models"].items():
        own = [key for key in reader.stored if key.startswith(f"{name}/weights/")]
        layout = {key: value for key, value in said["layout"].items() if value not in (1, 0, False)}
        adapters = f", adapters {said['adapters']}" if "adapters" in said else ""
        say(
            f"model       {name}: {said['hf_config'].get('model_type')} in {said['dtype'].removeprefix('torch.')}, "
            f"{len(own)} tensors of weights{adapters}, from {said['path']}, cut for {layout or 'one rank'}\n"
        )
    size = sum(box.length for box in pieces)
    say(f"tensors     {len(reader.stored)} in {len(pieces)} pieces, {size:,} bytes\n")
    for name, known in manifest.get("inputs", {}).items():
        told = ", ".join(f"{kind} {value}" for kind, value in known.items())
        say(f"read        {name}: {told}\n")
    if check:
        check_pieces(reader)
    for key, boxes in reader.stored.items() if tensors else ():
        say(f"{key}  {manifest['shapes'][key]}  {boxes[0].dtype}  {len(boxes)} piece(s)\n")
    say(f"as a folder of Hugging Face: rftmega convert to-hf {folder} OUT\n")
    return 0


def listed(folder: Path, *, check: bool) -> list[tuple[str, tuple[int, ...], str, str]]:
    """Prints a summary of a Megatron distributed checkpoint. Returns (name, shape, dtype, text with
    the number of stored blocks) for each tensor. `check`: also verify all checksums.
    """
    reader = Reader(folder)
    layout = reader.manifest["layout"] or "one rank"
    pieces = [box for boxes in reader.stored.values() for box in boxes]
    rows = [
        (key, tuple(reader.manifest["shapes"][key]), boxes[0].dtype, f"{len(boxes)} piece(s)")
        for key, boxes in reader.stored.items()
    ]
    size = sum(box.length for box in pieces)
    sys.stdout.write(f"kind        Megatron distributed checkpoint, cut for {layout}\n")
    sys.stdout.write(f"tensors     {len(rows)} in {len(pieces)} pieces, {size:,} bytes\n")
    if check:
        check_pieces(reader)
    return rows


def check_pieces(reader: Reader) -> None:
    """Reads every stored block of a checkpoint. Raises CheckpointError if the checksum of a block
    does not match.
    """
    pieces = [box for boxes in reader.stored.values() for box in boxes]
    for box in tqdm(pieces, unit="piece", file=sys.stderr):
        target = torch.empty(box.shape, dtype=getattr(torch, box.dtype))
        reader.fill(target, box.key, box.offset)
    sys.stdout.write("checksums   all as in the manifest\n")
