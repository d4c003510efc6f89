"""Writes train.jsonl, eval.jsonl and warm_start.jsonl: sums of two numbers below 50, no prompt in more than one file.

A prompt is held out, its mirror image need not be: 3+4= may be trained on while 4+3= is in eval.jsonl.
"""

import argparse
import json
import random
from pathlib import Path

BELOW = 50
SIZES = {"eval": 200, "warm_start": 1000, "train": 1300}


def write(folder: Path, *, seed: int = 0) -> None:
    pairs = [(a, b) for a in range(BELOW) for b in range(BELOW)]
    random.Random(seed).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        lines = [json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) for a, b in pairs[:size]]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        pairs = pairs[size:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/demo/data"))
    write(parser.parse_args().folder)
