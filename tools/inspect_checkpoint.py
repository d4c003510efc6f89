"""Lists the contents of a Hugging Face folder, of a Megatron distributed checkpoint or of a run's
training checkpoint: model, layout, tensors, checksums.
"""

import argparse
import sys
from pathlib import Path

from rftmega.core.errors import exit_code_of


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

    from rftmega.checkpoints.reader import is_distributed
    from rftmega.model_providers.description import describe
    from rftmega.model_providers.hf_config import read_hf_config
    from rftmega.models.hf.hf_folder import HFFolder
    from rftmega.run.conversion.run_checkpoint import checkpoint_in, listed, shown

    if (checkpoint := checkpoint_in(chosen.folder)) is not None:
        return shown(checkpoint, tensors=chosen.tensors, check=chosen.check)
    model, say = describe(read_hf_config(chosen.folder)), sys.stdout.write
    say(
        f"model       {model.family}, {model.parameters:,} parameters, {model.layers} layers, vocabulary {model.vocabulary}\n"
    )
    if is_distributed(chosen.folder):
        rows = listed(chosen.folder, check=chosen.check)
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
