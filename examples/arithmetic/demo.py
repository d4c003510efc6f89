"""The whole loop on a laptop: data, a warm start, GRPO on 4 processes; the results are in runs/demo.

Arguments are overrides of grpo.yaml, e.g. parallel.tensor=4 parallel.pipeline=1; --processes N
changes the number of processes. `rftmega demo --real` is the demo of examples/smollm, with a published
model.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rftmega.config import load
from rftmega.core.errors import ConfigError


def run(*command: object) -> None:
    """Runs a Python command; exits with its exit code if it fails or is interrupted."""
    process = subprocess.Popen([sys.executable, *map(str, command)])
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # the child receives it too, and ends its ranks first
            continue
    if code:
        sys.exit(code if code > 0 else 128 - code)


def main(
    example: Path = Path(__file__).parent,
    description: str | None = __doc__,
    own: Sequence[str] = (),
) -> None:
    """Runs make_data.py, warm_start.py and grpo.yaml of an example's folder, with the overrides
    `own`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="option=value")
    parser.add_argument("--processes", type=int, default=4)
    given = parser.parse_args()
    try:
        overrides = [*own, *given.overrides]
        load(example / "grpo.yaml", overrides)
    except ConfigError as error:  # before the warm start
        sys.exit(f"error: {error}")
    run(example / "make_data.py")
    run(example / "warm_start.py")
    run("-m", "rftmega", "train", example / "grpo.yaml", *overrides, "--processes", given.processes)


if __name__ == "__main__":
    main()
