"""Converts between Hugging Face folders and Megatron's distributed checkpoints, without a GPU and
one tensor at a time.

    rftmega convert to-megatron HF_DIR OUT [--tp 2 --pp 2 ...]   any layout can read OUT; this one reads it fastest
    rftmega convert to-hf CHECKPOINT OUT                         CHECKPOINT is Megatron's, or a run's (its latest)
    rftmega convert to-plain HF_DIR OUT                          writes plain safetensors weights of FP8, MXFP4 or .bin files
    rftmega convert merge HF_DIR ADAPTER OUT                     merges a PEFT folder into its model's weights
    rftmega convert extract HF_DIR TRAINED OUT --rank 16         approximates the difference of two models by adapters
    rftmega convert checksums HF_DIR                             writes checksums for model.verify; to-hf writes them, too
    rftmega convert verify A B [--logits]                        compares A and B, each of either format, tensor by tensor

An interrupted conversion resumes when it is called again with the same arguments.
"""

import argparse
import logging
import sys
import warnings
from functools import partial
from pathlib import Path

from rftmega.config.options.adapters import HF_TARGETS
from rftmega.core.errors import RFTMegaError, exit_code_of

LAYOUT = {
    "tp": ("tensor", "tensor-parallel ranks"),
    "pp": ("pipeline", "stages"),
    "vpp": ("virtual_pipeline", "interleaved chunks a stage"),
    "ep": ("expert", "ranks that share the experts"),
    "etp": ("expert_tensor", "ranks that share an expert"),
}


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    to_megatron = commands.add_parser(
        "to-megatron", help="Hugging Face folder -> distributed checkpoint"
    )
    to_megatron.add_argument("source", type=Path, metavar="HF_DIR")
    to_megatron.add_argument("target", type=Path, metavar="OUT")
    for flag, (_, meaning) in LAYOUT.items():
        to_megatron.add_argument(
            f"--{flag}", type=int, default=1, metavar="N", help=f"{meaning} that will read it (1)"
        )
    to_hf = commands.add_parser("to-hf", help="distributed checkpoint -> Hugging Face folder")
    to_hf.add_argument("source", type=Path, metavar="CHECKPOINT")
    to_hf.add_argument("target", type=Path, metavar="OUT")
    to_hf.add_argument("--base", type=Path, help="of a run's own: the model that it began with")
    to_hf.add_argument("--model", default="", help="of a run's own: critic, for that one")
    for command in (to_megatron, to_hf):
        command.add_argument(
            "--verify", action="store_true", help="then compare OUT with the source"
        )
    to_plain = commands.add_parser(
        "to-plain", help="FP8, MXFP4 or *.bin weights -> plain safetensors in the model's dtype"
    )
    to_plain.add_argument("source", type=Path, metavar="HF_DIR")
    to_plain.add_argument("target", type=Path, metavar="OUT")
    merge = commands.add_parser("merge", help="a model and a PEFT folder -> Hugging Face folder")
    merge.add_argument("source", type=Path, metavar="HF_DIR")
    merge.add_argument("adapter", type=Path, metavar="ADAPTER")
    merge.add_argument("target", type=Path, metavar="OUT")
    extract = commands.add_parser("extract", help="a model and one trained from it -> PEFT folder")
    extract.add_argument("source", type=Path, metavar="HF_DIR")
    extract.add_argument("trained", type=Path, metavar="TRAINED")
    extract.add_argument("target", type=Path, metavar="OUT")
    extract.add_argument("--rank", type=int, required=True, metavar="N", help="of the pairs")
    extract.add_argument(
        "--targets",
        nargs="+",
        default=HF_TARGETS,
        metavar="MODULE",
        help="layers that get pairs, as q_proj (all linear ones of attention and MLP)",
    )
    checksums = commands.add_parser(
        "checksums", help="write checksums.json into a Hugging Face folder"
    )
    checksums.add_argument("source", type=Path, metavar="HF_DIR")
    verify = commands.add_parser("verify", help="compare two folders of either kind")
    verify.add_argument("source", type=Path, metavar="A")
    verify.add_argument("target", type=Path, metavar="B")
    verify.add_argument(
        "--logits",
        action="store_true",
        help="also compare Megatron's logits of B with those of transformers of A",
    )
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    chosen = arguments(given)
    warnings.filterwarnings("ignore")
    say = logging.StreamHandler(sys.stderr)
    say.addFilter(
        lambda record: record.name.startswith("rftmega") or record.levelno >= logging.ERROR
    )
    logging.basicConfig(handlers=[say], format="%(message)s")
    try:
        return exit_code_of(run, chosen)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command goes on from here.\n")
        return 130


def run(chosen: argparse.Namespace) -> int:
    if chosen.command == "to-hf":
        import rftmega.runtime.device.before_megatron  # noqa: F401

        # isort: split
        from rftmega.run.conversion.run_checkpoint import checkpoint_in, write_model

        if (own := checkpoint_in(chosen.source)) is not None:
            return write_model(own, chosen.target, chosen.model, chosen.base, verify=chosen.verify)
    if not (chosen.source / "config.json").is_file():
        raise RFTMegaError(
            f"{chosen.source} holds no config.json, so it is neither a Hugging Face folder nor a checkpoint of ours."
        )
    if chosen.command == "checksums":
        from rftmega.models.hf.checksums import write_sums

        write_sums(chosen.source)
        return 0
    if chosen.command == "to-plain":
        return of_plain(chosen.source, chosen.target)
    if chosen.command in ("merge", "extract"):
        return of_adapters(chosen)
    import rftmega.runtime.device.before_megatron  # noqa: F401

    # isort: split
    from rftmega.config import ParallelConfig
    from rftmega.run.conversion import convert
    from rftmega.run.conversion.progress_bar import progress_bar
    from rftmega.runtime.parallel import process_group

    bar = partial(progress_bar, chosen.source)
    changed = None
    with process_group.start():
        if chosen.command == "to-megatron":
            layout = {name: getattr(chosen, flag) for flag, (name, _) in LAYOUT.items()}
            with bar("to Megatron") as progress:
                parallel = ParallelConfig(**layout, sequence=chosen.tp > 1)
                changed = convert.to_megatron(
                    chosen.source, chosen.target, parallel, progress=progress.update
                )
        elif chosen.command == "to-hf":
            with bar("to Hugging Face") as progress:
                changed = convert.to_hf(chosen.source, chosen.target, progress=progress.update)
        if changed:
            sys.stdout.write(f"{chosen.target}: {changed}\n")
        for folder in (
            (chosen.source, chosen.target) if chosen.command == "verify" else (chosen.source,)
        ):
            if told := convert.told_left_out(folder):
                sys.stdout.write(f"left out of {folder}: {told}\n")
        if chosen.command == "verify" or chosen.verify:
            with bar("verify", copies=2) as progress:
                count = convert.verify(chosen.source, chosen.target, progress=progress.update)
            sys.stdout.write(f"{count} tensors are equal, byte by byte\n")
        if chosen.command == "verify" and chosen.logits:
            from rftmega.run.conversion.logits import logit_difference

            sys.stdout.write(
                f"logits differ by {logit_difference(chosen.source, chosen.target):.1e} at most\n"
            )
    return 0


def of_plain(source: Path, target: Path) -> int:
    """Writes the folder `source` with plain weights to `target`. Returns the exit code 0."""
    from rftmega.run.conversion.plain_safetensors import bytes_of_weights, to_plain
    from rftmega.run.conversion.progress_bar import progress_bar

    total = bytes_of_weights(source)
    with progress_bar(source, "to plain weights", total=total) as bar:
        changed = to_plain(source, target, progress=bar.update)
    sys.stdout.write(f"{target}: {changed or 'config.json is unchanged'}\n")
    return 0


def of_adapters(chosen: argparse.Namespace) -> int:
    """Merges or extracts adapters, and prints the share lost by rounding or by the limited rank.
    Returns the exit code 0. `chosen`: the parsed command line.
    """
    from rftmega.run.conversion import adapters
    from rftmega.run.conversion.progress_bar import progress_bar

    one, target = chosen.source, chosen.target
    with progress_bar(one, chosen.command) as bar:
        if chosen.command == "merge":
            told = str(adapters.merge(one, chosen.adapter, target, progress=bar.update))
        else:
            given = {"rank": chosen.rank, "targets": chosen.targets}
            told = str(adapters.extract(one, chosen.trained, target, progress=bar.update, **given))
    sys.stdout.write(f"{told}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
