"""Writes train.jsonl, eval.jsonl and warm_start.jsonl: sums of two numbers below 50.

a+b and b+a are in the same file, so that held-out sums are held out.
"""

import argparse
import json
import random
from pathlib import Path

BELOW = 50
SIZES = {"eval": 100, "warm_start": 500, "train": 675}  # unordered pairs


def write(folder: Path, *, seed: int = 0) -> None:
    pairs = [(a, b) for a in range(BELOW) for b in range(a, BELOW)]
    random.Random(seed).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        both_ways = [order for a, b in pairs[:size] for order in dict.fromkeys([(a, b), (b, a)])]
        lines = [json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) for a, b in both_ways]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        pairs = pairs[size:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/demo/data"))
    write(parser.parse_args().folder)
