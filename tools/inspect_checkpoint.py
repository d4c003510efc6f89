"""Lists what is in a Hugging Face folder or one of Megatron's distributed checkpoints: model,
layout, tensors, checksums.
"""

import argparse
import sys
from pathlib import Path

from rftmega.errors import exit_code_of


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

    import torch
    from tqdm import tqdm

    from rftmega.checkpoint.reader import Reader, is_distributed
    from rftmega.hf_folders.hf_folder import HFFolder
    from rftmega.model_providers.description import describe
    from rftmega.model_providers.hf_config import read_hf_config

    model = describe(read_hf_config(chosen.folder))
    say = sys.stdout.write
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
            for box in tqdm(pieces, unit="piece", file=sys.stderr):
                target = torch.empty(box.shape, dtype=getattr(torch, box.dtype))
                reader.fill(target, box.key, box.offset)
            say("checksums   all as in the manifest\n")
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


if __name__ == "__main__":
    sys.exit(main())
