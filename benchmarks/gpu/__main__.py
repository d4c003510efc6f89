"""Benchmarks a single device, part by part: python -m benchmarks.gpu [PART ...]

Several parts, or all if none is named, run in processes of their own, each within its time limit;
rows that can't run here are skipped with a reason. Each part writes runs/gpu/PART.json after every
row. On a CPU, and with --small, sizes are small and the files are in runs/gpu-small. `python -m
website.results --from runs` takes them into docs/results.md.
"""

import argparse
import importlib
import subprocess
import sys
import warnings
from pathlib import Path

# Megatron's about missing packages, which a sheet records in its first lines
warnings.filterwarnings("ignore")

import rftmega.runtime.device.before_megatron  # noqa: F401

# isort: split
from benchmarks.gpu.parts import PARTS, missing
from benchmarks.gpu.sheet import Sheet
from rftmega.model_providers.optional_cuda_packages import installed
from rftmega.runtime import device
from rftmega.runtime.parallel import process_group

LIMIT = 570  # seconds of one part: below ten minutes including start and end


def measure(name: str, target: Path, *, small: bool) -> int:
    """Runs one part in this process. Returns the exit code: 1 if a row raised."""
    part = PARTS[name]
    reason = missing(part)
    told = "" if reason else installed().told
    if reason:
        sheet = Sheet(target / f"{name}.json", {})
        for row in part.rows:
            sheet.skip(row, reason)
        return 0
    module = importlib.import_module(f"benchmarks.gpu.{part.module}")
    sizes = part.sizes(small=small)
    sheet = Sheet(target / f"{name}.json", sizes._asdict(), told=told)
    with process_group.start() as world:
        module.measure(world, sheet, sizes)
    return 1 if sheet.failed else 0


def each_by_itself(names: list[str], target: Path, *, small: bool, limit: float) -> int:
    """Runs every part in its own process. Returns the exit code: 1 if one failed or timed out."""
    failed = []
    for name in names:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            name,
            "--target",
            str(target),
            *(["--small"] if small else []),
        ]
        try:
            code = subprocess.run(command, check=False, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = 1
            sys.stdout.write(
                f"{name}: ended after {limit:.0f} s; its file has the rows that were done\n"
            )
        failed += [name] if code else []
    if failed:
        sys.stdout.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--small",
        action="store_true",
        help="small sizes on a GPU too: is everything there that is needed?",
    )
    parser.add_argument("--target", type=Path, help="folder of the JSON files")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        help="seconds of one part, where several are asked for",
    )
    given = parser.parse_args()
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; these are: {', '.join(PARTS)}")
    small = given.small or device.current().type == "cpu"
    target = given.target or Path("runs/gpu-small" if small else "runs/gpu")
    if len(given.parts) == 1:
        return measure(given.parts[0], target, small=small)
    return each_by_itself(given.parts or list(PARTS), target, small=small, limit=given.limit)


if __name__ == "__main__":
    sys.exit(main())
