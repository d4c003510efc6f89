"""Lists what is in a Hugging Face folder, one of Megatron's distributed checkpoints or a run's own:
model, layout, tensors, checksums.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rftmega.errors import exit_code_of

if TYPE_CHECKING:
    from rftmega.checkpoint.reader import Reader


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--tensors", action="store_true", help="list every tensor with shape, dtype and checksum"
    )
    parser.add_argument(
        "--check", action="store_true", help="read every piece and compare its checksum"
    )
    return exit_code_of(show, parser.parse_args(given))


def show(chosen: argparse.Namespace) -> int:
    import math

    from rftmega.checkpoint.reader import Reader, is_distributed
    from rftmega.hf_folders.hf_folder import HFFolder
    from rftmega.model_providers.description import describe
    from rftmega.model_providers.hf_config import read_hf_config

    say = sys.stdout.write
    if (checkpoint := checkpoint_in(chosen.folder)) is not None:
        return show_of_a_run(checkpoint, chosen)
    model = describe(read_hf_config(chosen.folder))
    say(
        f"model       {model.family}, {model.parameters:,} parameters, {model.layers} layers, vocabulary {model.vocabulary}\n"
    )
    if is_distributed(chosen.folder):
        reader = Reader(chosen.folder)
        layout = reader.manifest["layout"] or "one rank"
        pieces = [box for boxes in reader.stored.values() for box in boxes]
        rows = [
            (key, tuple(reader.manifest["shapes"][key]), boxes[0].dtype, f"{len(boxes)} piece(s)")
            for key, boxes in reader.stored.items()
        ]
        say(f"kind        Megatron distributed checkpoint, cut for {layout}\n")
        say(
            f"tensors     {len(rows)} in {len(pieces)} pieces, {sum(box.length for box in pieces):,} bytes\n"
        )
        if chosen.check:
            check(reader)
    else:
        files = HFFolder(chosen.folder)
        rows = [
            (name, files.shape_of(name), str(files.dtype_of(name)).removeprefix("torch."), "")
            for name in sorted(files.names)
        ]
        say(f"kind        Hugging Face folder, {len(files.files)} file(s)\n")
        say(
            f"tensors     {len(rows)}, {sum(math.prod(shape) for _, shape, _, _ in rows):,} elements\n"
        )
    for name, shape, dtype, more in rows if chosen.tensors else []:
        say(f"{name}  {list(shape)}  {dtype}  {more}\n")
    return 0


def checkpoint_in(folder: Path) -> Path | None:
    """The checkpoint of a run that a folder is, or the latest in it."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return None
    import rftmega.device.before_megatron  # noqa: F401

    # isort: split
    from rftmega.conversion import trained

    return trained.checkpoint_in(folder)


def show_of_a_run(folder: Path, chosen: argparse.Namespace) -> int:
    """Lists the models of a run's checkpoint, and how to make folders of them."""
    from rftmega.checkpoint.training import TrainingReader

    reader, say = TrainingReader(folder), sys.stdout.write
    manifest = reader.manifest
    pieces = [box for boxes in reader.stored.values() for box in boxes]
    say(f"kind        a run's checkpoint, after step {manifest['step']}\n")
    for name, said in manifest["models"].items():
        own = [key for key in reader.stored if key.startswith(f"{name}/weights/")]
        layout = {
            option: value for option, value in said["layout"].items() if value not in (1, False, 0)
        }
        adapters = f", adapters {said['adapters']}" if "adapters" in said else ""
        say(
            f"model       {name}: {said['hf_config'].get('model_type')} in {said['dtype'].removeprefix('torch.')}, "
            f"{len(own)} tensors of weights{adapters}, from {said['path']}, cut for {layout or 'one rank'}\n"
        )
    say(
        f"tensors     {len(reader.stored)} in {len(pieces)} pieces, {sum(box.length for box in pieces):,} bytes\n"
    )
    for name, known in manifest.get("inputs", {}).items():
        say(
            f"read        {name}: {', '.join(f'{kind} {value}' for kind, value in known.items())}\n"
        )
    if chosen.check:
        check(reader)
    for key, boxes in reader.stored.items() if chosen.tensors else ():
        say(f"{key}  {manifest['shapes'][key]}  {boxes[0].dtype}  {len(boxes)} piece(s)\n")
    say(f"as a folder of Hugging Face: rftmega convert to-hf {folder} OUT\n")
    return 0


def check(reader: "Reader") -> None:
    """Reads every piece. Raises CheckpointError where one is not as it was written."""
    import torch
    from tqdm import tqdm

    pieces = [box for boxes in reader.stored.values() for box in boxes]
    for box in tqdm(pieces, unit="piece", file=sys.stderr):
        target = torch.empty(box.shape, dtype=getattr(torch, box.dtype))
        reader.fill(target, box.key, box.offset)
    sys.stdout.write("checksums   all as in the manifest\n")


if __name__ == "__main__":
    sys.exit(main())
